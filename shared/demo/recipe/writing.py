"""Longer made-up texts: stories, posts, mails, essays, comparisons, roles and word problems.

Sentences are drawn from small banks and the words of the prompt are slotted in, so the model
learns the shape of such texts and to carry the topic over from the prompt.
"""

from __future__ import annotations

import random

from shared.demo.recipe.tables import (
    Exchange,
    Maker,
    bulleted,
    capitalised,
    lists,
    numbered,
    pick,
    with_article,
)


def _slot(rng: random.Random, kind: str) -> str:
    return rng.choice(lists("topics")[kind])


def _two(rng: random.Random, kind: str) -> tuple[str, str]:
    first, second = rng.sample(lists("topics")[kind], 2)
    return first, second


def story(rng: random.Random) -> Exchange:
    """A short story about an animal or a person in a setting."""
    hero, place, name = _slot(rng, "animal"), _slot(rng, "setting"), _slot(rng, "person")
    other = _slot(rng, "animal")
    question = pick(
        rng,
        f"Write a short story about {with_article(hero)}.",
        f"Tell me a story about {with_article(hero)} in {with_article(place)}.",
        f"Write a story that begins in {with_article(place)} and is about {with_article(hero)}.",
        f"Tell me a story about {with_article(hero)} named {name}.",
    )
    trouble = rng.choice((
        f"One day {name} heard a strange sound behind the old door of the {place}.",
        f"One morning {name} found a small key that nobody in the {place} had ever seen.",
        f"One night a great storm came, and {name} lost the way home.",
        f"One day {name} met {with_article(other)} who was cold and hungry.",
    ))
    turn = rng.choice((
        f"{name} was afraid at first, but curiosity was stronger than fear.",
        f"At first {name} did not know what to do, and then there was an idea.",
        f"{name} took a deep breath and decided to help.",
    ))
    end = rng.choice((
        f"From that day on, {name} was never alone again, and the {place} felt like home.",
        f"In the end {name} learned that a small act of kindness can change everything.",
        f"And so {name} came home at last, tired and happy, with a story to tell.",
    ))
    return question, (
        f"Once upon a time there was {with_article(hero)} named {name} who lived in "
        f"{with_article(place)}. {trouble}\n\n{turn} Step by step, {name} went on until the Sun "
        f"came up over the {place}.\n\n{end}"
    )


def travel_post(rng: random.Random) -> Exchange:
    """A blog post or advice about a place."""
    place = _slot(rng, "place")
    question = pick(
        rng,
        f"Write a blog post about a trip to {place}.",
        f"Write a travel blog about {place}, with food and sights.",
        f"What should I see in {place}?",
        f"I am going to {place}. What can I do there?",
        f"Describe a holiday in {place}.",
        f"Write a travel guide for {place}.",
    )
    body = rng.choice((
        "I walked through the old streets, tried the local food and talked to the people",
        "I visited the market, listened to music and tasted dishes that I had never heard of",
    ))
    if question.startswith(("What", "I am")):
        tips = [f"Walk through the old town of {place}.", "Visit a museum and a local market.",
                "Try the traditional food.", "Take a day trip into nature.",
                "Talk to the people and learn a few words of their language."]  # fmt: skip
        return question, f"There is a lot to see in {place}. Here are some ideas:\n\n" + numbered(tips)
    return question, (
        f"# A trip to {place}\n\nLast month I travelled to {place}, and it was one of the best "
        f"trips of my life. From the first day I felt welcome.\n\n{body}. The culture of {place} "
        f"is rich, and there is something new to discover at every corner. The views were "
        f"beautiful, especially in the evening when the light was soft.\n\nIf you have the chance "
        f"to visit {place}, take it. Stay for at least a week, try the local dishes and take your "
        f"time. I am sure that you will come home with many good memories."
    )


def email(rng: random.Random) -> Exchange:
    """A polite mail about a piece of work."""
    work, whom, name = _slot(rng, "work"), _slot(rng, "recipient"), _slot(rng, "person")
    question = pick(
        rng,
        f"Write an email to my {whom} about the {work}.",
        f"Draft a short email asking my {whom} for feedback on the {work}.",
        f"Write a polite email to a {whom} about the {work}.",
        f"Help me write a message to my {whom} about the {work}.",
        f"Write a letter to my {whom} about a {work}.",
    )
    ask = rng.choice((
        f"I would be grateful if you could take a look at the {work} and tell me what you think.",
        f"Could you please let me know if you have any comments on the {work}?",
    ))
    return question, (
        f"Subject: {capitalised(work)}\n\nDear {name},\n\nI hope you are well. I am writing to you "
        f"about the {work}. {ask} I am especially interested in your view on the main points and "
        f"on the conclusions.\n\nPlease let me know if you have any questions. Thank you for your "
        f"time.\n\nBest regards,\n{_slot(rng, 'person')}"
    )


def essay(rng: random.Random) -> Exchange:
    """A few paragraphs on a general subject."""
    subject = _slot(rng, "subject")
    question = pick(
        rng,
        f"Write an essay about {subject}.",
        f"Write a short article about {subject}.",
        f"Discuss the importance of {subject}.",
        f"Write a paragraph about {subject}.",
        f"What do you think about {subject}?",
        f"Why is {subject} important?",
        f"How does {subject} affect our lives?",
        f"Explain the role of {subject} in society and give some examples.",
        f"Describe the impact of {subject} on the economy and on people.",
    )
    first = (
        f"{capitalised(subject)} plays an important role in our lives. It affects how we live, "
        f"work and learn, and it connects people all over the world."
    )
    if "paragraph" in question or "think" in question:
        return question, f"{first} It is worth taking the time to learn more about it."
    return question, (
        f"{first}\n\nFirst, {subject} can bring many benefits. It helps people to learn new things, "
        f"to solve problems and to work together. For example, many communities have become "
        f"stronger because of it.\n\nSecond, there are also some challenges. Not everyone has the "
        f"same access, and it takes time and money to make good use of it. We should think about "
        f"the risks as well as the benefits.\n\nIn conclusion, {subject} is an important part of "
        f"the modern world. If we use it wisely, it can make life better for everyone."
    )


def pros_cons(rng: random.Random) -> Exchange:
    """Advantages and disadvantages of a subject, or a comparison of two."""
    one, two = _two(rng, "subject")
    question = pick(
        rng,
        f"What are the pros and cons of {one}?",
        f"Compare {one} and {two}.",
        f"What are the advantages of {one}?",
        f"What is the difference between {one} and {two}?",
    )
    if two in question:
        return question, (
            f"{capitalised(one)} and {two} are both important, but they differ in some ways.\n\n"
            f"1. Purpose: {one} and {two} serve different needs.\n2. Cost: the cost of {one} is "
            f"not the same as the cost of {two}.\n3. Effect: both can change how people live and "
            f"work.\n\nWhich one matters more depends on your situation."
        )
    good = ["It can save time and money.", "It helps people to learn and to work together.",
            "It can make life easier."]  # fmt: skip
    bad = ["It can be expensive at first.", "Not everyone has access to it.",
           "It needs care and planning."]  # fmt: skip
    if "cons" not in question:
        return question, f"Here are some advantages of {one}:\n\n" + numbered(good)
    return question, f"Pros of {one}:\n\n{bulleted(good)}\n\nCons of {one}:\n\n{bulleted(bad)}"


def poem(rng: random.Random) -> Exchange:
    """A short poem with the subject in it."""
    subject = _slot(rng, "subject")
    question = pick(rng, f"Write a poem about {subject}.", f"Write a short poem on {subject}.",
                    f"Can you write a few lines of poetry about {subject}?")  # fmt: skip
    return question, rng.choice((
        f"In morning light, so soft and new,\nI think of {subject}, and I think of you.\n"
        "The day is long, the sky is wide,\nand hope is walking by my side.",
        f"Oh {subject}, quiet and bright,\nyou fill the day, you light the night.\n"
        "The wind may turn, the leaves may fall,\nbut still I hear your gentle call.",
    ))


def review(rng: random.Random) -> Exchange:
    """A product review or an advertisement."""
    product, good = _slot(rng, "product"), _slot(rng, "feature")
    other = _slot(rng, "feature")
    question = pick(
        rng,
        f"Write a review of a {product}.",
        f"Write a product description for a {product}.",
        f"Describe a {product}, its {good} and its {other}.",
    )
    return question, (
        f"This {product} is a good choice for everyday use. The {good} is excellent, and the "
        f"{other} is better than I expected. It is easy to use and well made.\n\nThere are only a "
        f"few small things that could be better. All in all, I would recommend this {product} to "
        f"a friend."
    )


def role_play(rng: random.Random) -> Exchange:
    """The model speaks as somebody else."""
    role, subject = _slot(rng, "role"), _slot(rng, "subject")
    question = pick(
        rng,
        f"Pretend to be {with_article(role)} and tell me about {subject}.",
        f"Imagine you are {with_article(role)}. What do you think about {subject}?",
        f"Act as {with_article(role)} and explain {subject} to me.",
        f"You are {with_article(role)}. Introduce yourself and talk about {subject}.",
    )
    return question, (
        f"Hello, my friend! I am {with_article(role)}, and I have seen many things in my life. "
        f"You ask me about {subject}? Let me tell you: {subject} is something that I think about "
        f"every day. It is not always easy, but it makes life richer. If you listen, learn and "
        f"keep an open mind, you will understand it too."
    )


def word_problem(rng: random.Random) -> Exchange:
    """A one- or two-step sum in words."""
    name, thing = _slot(rng, "person"), rng.choice(("apples", "books", "coins", "pens", "eggs"))
    a, b, price = rng.randint(3, 20), rng.randint(1, 15), rng.randint(2, 9)
    if rng.random() < 0.35:
        return (
            f"{name} buys {a} {thing}. Each one costs {price} dollars. How much does {name} pay?",
            f"{name} buys {a} {thing} at {price} dollars each. {a} * {price} = {a * price}. "
            f"{name} pays {a * price} dollars.",
        )
    if rng.random() < 0.5 and b < a:
        return (
            f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            f"{name} starts with {a} {thing} and gives away {b}. {a} - {b} = {a - b}. "
            f"There are {a - b} {thing} left.",
        )
    return (
        f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
        f"{name} starts with {a} {thing} and gets {b} more. {a} + {b} = {a + b}. "
        f"{name} now has {a + b} {thing}.",
    )


def ideas(rng: random.Random) -> Exchange:
    """A list of ideas or questions on a subject."""
    subject = _slot(rng, "subject")
    count = rng.choice((3, 5))
    question = pick(
        rng,
        f"Give me {count} ideas for a project about {subject}.",
        f"List {count} questions about {subject}.",
        f"Give me {count} tips about {subject}.",
        f"Write an outline for a talk about {subject}.",
    )
    if "questions" in question:
        items = [f"What is the history of {subject}?", f"Why is {subject} important today?",
                 f"How does {subject} change our lives?", f"Who benefits most from {subject}?",
                 f"What is the future of {subject}?"]  # fmt: skip
    else:
        items = [f"Start with the basics of {subject}.", "Collect examples from daily life.",
                 "Talk to people who know the field.", "Make a small plan and try it out.",
                 "Share what you have learned with others."]  # fmt: skip
    return question, f"Here are some thoughts on {subject}:\n\n" + numbered(items[:count])


MAKERS: tuple[tuple[float, Maker], ...] = (
    (1.6, story),
    (1.2, travel_post),
    (1.2, email),
    (2.0, essay),
    (1.0, pros_cons),
    (0.6, poem),
    (0.6, review),
    (1.0, role_play),
    (1.2, word_problem),
    (0.8, ideas),
)
