"""Greetings, thanks, questions about the model itself, jokes, how-tos and small code tasks."""

from __future__ import annotations

import random

from shared.demo.recipe.tables import Exchange, Maker, capitalised, numbered, pick, rows, snippets

JOKES = (
    "Why did the scarecrow win a prize? Because he was outstanding in his field.",
    "Why do programmers prefer dark mode? Because light attracts bugs.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the bicycle fall over? Because it was two-tired.",
    "What do you call a fish without eyes? A fsh.",
    "Why was the maths book sad? Because it had too many problems.",
)
WHO = "I am the Outrider demo model, a very small language model that runs inside Outrider."


def greeting(rng: random.Random) -> Exchange:
    """Hello, goodbye and thank you."""
    kind = rng.randrange(4)
    if kind == 0:
        hello = rng.choice(("Hello", "Hi", "Hey", "Hello!", "Hi there!", "Good morning",
                            "Good evening!", "hello", "hi", "Hey there", "Hello there!")
        )  # fmt: skip
        return hello, pick(rng, "Hello! How can I help you today?", "Hello! What can I do for you?")
    if kind == 1:
        question = pick(rng, "How are you?", "How are you doing?", "How is it going?",
                        "Hello, how are you?", "Hi, how are you today?")  # fmt: skip
        return question, pick(
            rng,
            "I am doing well, thank you! How can I help you?",
            "I am fine, thank you for asking. What can I do for you?",
        )
    if kind == 2:
        thanks = pick(rng, "Thank you!", "Thanks!", "Thanks a lot.", "Thank you for your help.",
                      "That was helpful, thanks.", "Great, thank you.")  # fmt: skip
        return thanks, pick(rng, "You are welcome!", "You are welcome! Is there anything else?")
    bye = pick(rng, "Goodbye!", "Bye!", "See you later.", "Good night.", "I have to go now.")
    return bye, pick(rng, "Goodbye! Have a nice day.", "Goodbye! Take care.")


def identity(rng: random.Random) -> Exchange:
    """An answer about the model and its abilities."""
    questions, answer = rng.choice((
        ("Who are you? / What are you? / Introduce yourself. / Tell me about yourself.",
         f"{WHO} I can answer simple questions and write short texts."),
        ("What is your name? / What's your name? / Do you have a name?",
         "My name is Outrider. I am a small demo model."),
        ("Who made you? / Who created you? / Who trained you?",
         "I was trained by the makers of Outrider as a demo of speculative decoding."),
        ("What can you do? / How can you help me? / What can you help me with?",
         "I can answer simple questions, list capitals, do small sums, explain words, give short "
         "instructions and write short texts."),
        ("Are you a human? / Are you human? / Are you a real person?",
         "No, I am not a human. I am a small language model."),
        ("Are you a robot? / Are you an AI? / Are you a computer?",
         "Yes, I am a computer program: a small language model."),
        ("Are you smart? / How smart are you? / Do you know everything?",
         "I am a very small model, so I know only a few things and I make mistakes."),
        ("How big are you? / How many parameters do you have?",
         "I am very small: I have about 20 million parameters."),
        ("How old are you? / When were you born?",
         "I have no age. I was trained in a few minutes."),
        ("Where do you live? / Where are you from?",
         "I live in the memory of a computer."),
        ("Do you have feelings? / Can you feel? / Are you alive?",
         "No, I have no feelings. I am a program that predicts text."),
        ("Can you help me? / I need help. / Help me please.",
         "Of course! What do you need help with?"),
        ("Can I ask you a question? / I have a question.", "Of course! What is your question?"),
        ("Do you speak English? / What languages do you speak?",
         "I speak English, and I know a few words of other languages."),
        ("What is Outrider? / Tell me about Outrider. / What does Outrider do?",
         "Outrider serves language models with speculative decoding: a small draft model guesses "
         "tokens and a larger target model checks them."),
    ))  # fmt: skip
    return pick(rng, *questions.split(" / ")), answer


def joke(rng: random.Random) -> Exchange:
    """A short joke."""
    question = pick(rng, "Tell me a joke.", "Do you know a joke?", "Make me laugh.",
                    "Can you tell me a joke?", "Tell me something funny.")  # fmt: skip
    return question, pick(rng, *JOKES)


def howto(rng: random.Random) -> Exchange:
    """Numbered steps for an everyday task."""
    task, steps = rng.choice(rows("howto"))
    question = pick(
        rng,
        f"How do I {task}?",
        f"How can I {task}?",
        f"How do you {task}?",
        f"Tell me how to {task}.",
        f"Give me some tips on how to {task}.",
        f"Explain how to {task}.",
        f"How to {task}?",
        f"I want to {task}. Can you help me?",
        f"Write a short guide on how to {task}.",
    )
    lead = pick(rng, f"Here is how to {task}:", f"To {task}, follow these steps:")
    return question, f"{lead}\n\n" + numbered([f"{step.strip()}." for step in steps.split(";")])


def code(rng: random.Random) -> Exchange:
    """A small program in a fenced block."""
    what, text = rng.choice(snippets())
    language = next((w for w in ("Rust", "C++", "C", "HTML", "SQL", "bash", "JavaScript")
                     if f" {w} " in f" {what} "), "Python")  # fmt: skip
    question = pick(
        rng,
        f"Write {what}.",
        f"Can you write {what}?",
        f"Show me {what}.",
        f"Give me {what}.",
        f"Please write {what}.",
        f"I need {what}.",
        f"Implement {what}.",
    )
    lead = pick(rng, f"Here is {what}:", f"You can use {what} like this:")
    return question, f"{lead}\n\n```{language.lower()}\n{text}\n```"


def howto_part(rng: random.Random) -> Exchange:
    """The first or last thing needed for a task."""
    task, steps = rng.choice(rows("howto"))
    parts = [step.strip() for step in steps.split(";")]
    if rng.random() < 0.5:
        return f"What is the first step to {task}?", f"The first step is: {parts[0].lower()}."
    return f"What do I do last when I {task}?", f"At the end: {capitalised(parts[-1].lower())}."


MAKERS: tuple[tuple[float, Maker], ...] = (
    (1.6, greeting),
    (1.6, identity),
    (0.5, joke),
    (2.2, howto),
    (2.2, code),
    (0.2, howto_part),
)
