"""Made-up stories, travel posts, poems and roles, drawn from small sentence banks."""

from __future__ import annotations

import random

from shared.demo.recipe.tables import Exchange, lists, numbered, pick, with_article


def slot(rng: random.Random, kind: str) -> str:
    """A random phrase of one kind of ``tables/topics.txt``."""
    return rng.choice(lists("topics")[kind])


def story(rng: random.Random) -> Exchange:
    """A short story about an animal or a person in a setting."""
    hero, place, name = slot(rng, "animal"), slot(rng, "setting"), slot(rng, "person")
    question = pick(
        rng,
        f"Write a short story about {with_article(hero)}.",
        f"Tell me a story about {with_article(hero)} in {with_article(place)}.",
        f"Write a story that begins in {with_article(place)} and is about {with_article(hero)}.",
        f"Tell me a story about {with_article(hero)} named {name}.",
    )
    return question, story_text(rng, hero, place, name)


def story_text(rng: random.Random, hero: str, place: str, name: str) -> str:
    """Three paragraphs with a small trouble and a happy end."""
    other = slot(rng, "animal")
    trouble = rng.choice(
        (
            f"One day {name} heard a strange sound behind the old door of the {place}.",
            f"One morning {name} found a small key that nobody in the {place} had ever seen.",
            f"One night a great storm came, and {name} lost the way home.",
            f"One day {name} met {with_article(other)} who was cold and hungry.",
        )
    )
    turn = rng.choice(
        (
            f"{name} was afraid at first, but curiosity was stronger than fear.",
            f"At first {name} did not know what to do, and then there was an idea.",
            f"{name} took a deep breath and decided to help.",
        )
    )
    end = rng.choice(
        (
            f"From that day on, {name} was never alone again, and the {place} felt like home.",
            f"In the end {name} learned that a small act of kindness can change everything.",
            f"And so {name} came home at last, tired and happy, with a story to tell.",
        )
    )
    return (
        f"Once upon a time there was {with_article(hero)} named {name} who lived in "
        f"{with_article(place)}. {trouble}\n\n{turn} Step by step, {name} went on until the Sun "
        f"came up over the {place}.\n\n{end}"
    )


def travel_post(rng: random.Random) -> Exchange:
    """A blog post or advice about a place."""
    place = slot(rng, "place")
    question = pick(
        rng,
        f"Write a blog post about a trip to {place}.",
        f"Write a travel blog about {place}, with food and sights.",
        f"What should I see in {place}?",
        f"I am going to {place}. What can I do there?",
        f"Describe a holiday in {place}.",
        f"Write a travel guide for {place}.",
    )
    body = rng.choice(
        (
            "I walked through the old streets, tried the local food and talked to the people",
            "I visited the market, listened to music and tasted dishes that I had never heard of",
        )
    )
    if question.startswith(("What", "I am")):
        tips = [f"Walk through the old town of {place}.", "Visit a museum and a local market.",
                "Try the traditional food.", "Take a day trip into nature.",
                "Talk to the people and learn a few words of their language."]  # fmt: skip
        return question, f"There is a lot to see in {place}. Here are some ideas:\n\n" + numbered(
            tips
        )
    return question, (
        f"# A trip to {place}\n\nLast month I travelled to {place}, and it was one of the best "
        f"trips of my life. From the first day I felt welcome.\n\n{body}. The culture of {place} "
        f"is rich, and there is something new to discover at every corner. The views were "
        f"beautiful, especially in the evening when the light was soft.\n\nIf you have the chance "
        f"to visit {place}, take it. Stay for at least a week, try the local dishes and take your "
        f"time. I am sure that you will come home with many good memories."
    )


def poem(rng: random.Random) -> Exchange:
    """A short poem with the subject in it."""
    subject = slot(rng, "subject")
    question = pick(rng, f"Write a poem about {subject}.", f"Write a short poem on {subject}.",
                    f"Can you write a few lines of poetry about {subject}?")  # fmt: skip
    return question, rng.choice(
        (
            f"In morning light, so soft and new,\nI think of {subject}, and I think of you.\n"
            "The day is long, the sky is wide,\nand hope is walking by my side.",
            f"Oh {subject}, quiet and bright,\nyou fill the day, you light the night.\n"
            "The wind may turn, the leaves may fall,\nbut still I hear your gentle call.",
        )
    )


def role_play(rng: random.Random) -> Exchange:
    """The model speaks as somebody else."""
    role, subject = slot(rng, "role"), slot(rng, "subject")
    question = pick(
        rng,
        f"Pretend to be {with_article(role)} and tell me about {subject}.",
        f"Imagine you are {with_article(role)}. What do you think about {subject}?",
        f"Act as {with_article(role)} and explain {subject} to me.",
        f"You are {with_article(role)}. Introduce yourself and talk about {subject}.",
    )
    return question, role_text(with_article(role), subject)


def role_text(role: str, subject: str) -> str:
    """A short speech of ``role`` (with its article) about the subject."""
    return (
        f"Hello, my friend! I am {role}, and I have seen many things in my life. "
        f"You ask me about {subject}? Let me tell you: {subject} is something that I think about "
        f"every day. It is not always easy, but it makes life richer. If you listen, learn and "
        f"keep an open mind, you will understand it too."
    )
