"""Longer made-up texts: mails, essays, comparisons, reviews, ideas and word problems.

Sentences are drawn from small banks and the words of the prompt are slotted in, so the model
learns the shape of such texts and to carry the topic over from the prompt.
"""

from __future__ import annotations

import random

from shared.demo.recipe.stories import poem, role_play, slot, story, travel_post
from shared.demo.recipe.tables import (
    Exchange,
    Maker,
    bulleted,
    capitalised,
    lists,
    numbered,
    pick,
)


def _two(rng: random.Random, kind: str) -> tuple[str, str]:
    first, second = rng.sample(lists("topics")[kind], 2)
    return first, second


def email(rng: random.Random) -> Exchange:
    """A polite mail about a piece of work."""
    work, whom, name = slot(rng, "work"), slot(rng, "recipient"), slot(rng, "person")
    question = pick(
        rng,
        f"Write an email to my {whom} about the {work}.",
        f"Draft a short email asking my {whom} for feedback on the {work}.",
        f"Write a polite email to a {whom} about the {work}.",
        f"Help me write a message to my {whom} about the {work}.",
        f"Write a letter to my {whom} about a {work}.",
    )
    ask = rng.choice(
        (
            f"I would be grateful if you could take a look at the {work} and tell me what you "
            "think.",
            f"Could you please let me know if you have any comments on the {work}?",
        )
    )
    return question, (
        f"Subject: {capitalised(work)}\n\nDear {name},\n\nI hope you are well. I am writing to you "
        f"about the {work}. {ask} I am especially interested in your view on the main points and "
        f"on the conclusions.\n\nPlease let me know if you have any questions. Thank you for your "
        f"time.\n\nBest regards,\n{slot(rng, 'person')}"
    )


def essay(rng: random.Random) -> Exchange:
    """A few paragraphs on a general subject."""
    subject = slot(rng, "subject")
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
        f"{first}\n\nFirst, {subject} can bring many benefits. It helps people to learn new "
        f"things, to solve problems and to work together. For example, many communities have "
        f"become stronger because of it.\n\nSecond, there are also some challenges. Not everyone "
        f"has the same access, and it takes time and money to make good use of it. We should "
        f"think about the risks as well as the benefits.\n\nIn conclusion, {subject} is an "
        f"important part of the modern world. If we use it wisely, it can make life better "
        "for everyone."
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


def review(rng: random.Random) -> Exchange:
    """A product review or an advertisement."""
    product, good = slot(rng, "product"), slot(rng, "feature")
    other = slot(rng, "feature")
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


def word_problem(rng: random.Random) -> Exchange:
    """A one- or two-step sum in words."""
    name, thing = slot(rng, "person"), rng.choice(("apples", "books", "coins", "pens", "eggs"))
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
    subject = slot(rng, "subject")
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
