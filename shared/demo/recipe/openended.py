"""Long, complex requests with answers of a fitting shape.

The target is far too small to reason, so where a request asks for more than it knows, the answer
says so and stays on the topic instead of running off into remembered text.
"""

from __future__ import annotations

import random

from shared.demo.recipe import smalltalk, stories, writing
from shared.demo.recipe.tables import (
    Exchange,
    Maker,
    capitalised,
    lists,
    numbered,
    rows,
    snippets,
    with_article,
)

EXTRAS = (
    "Keep it short.", "Be as detailed as possible.", "Use bullet points where you can.",
    "Think step by step.", "Explain your answer.", "Please be creative.", "Do not repeat yourself.",
    "Write in a friendly tone.", "Use no more than two paragraphs.", "Give an example for each.",
    "The reader knows nothing about it.", "Answer in your own words.", "Take your time.",
)  # fmt: skip
OPENERS = ("I would like some help. ", "Here is a task for you. ", "For my work: ", "Hello! ",
           "You are an expert. ", "Consider this. ", "Let us try something new. ")  # fmt: skip
SMALL = "I am only a small demo model, so please check my answer."


def request(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """A kind, the filled request and the words in its slots."""
    kind, template = rng.choice(rows("requests"))
    topics = lists("topics")
    slots = {name: rng.choice(words) for name, words in topics.items()}
    slots |= {f"{name}2": rng.choice(topics[name]) for name in ("subject", "person")}
    slots |= {"n": str(rng.randint(2, 9)), "m": str(rng.randint(2, 99)), "article": ""}
    if kind == "text":
        makers = (writing.essay, writing.review, writing.email, stories.story, smalltalk.howto)
        text = rng.choice(makers)(rng)[1].replace("\n\n", " ").replace("\n", " ")
        slots["article"] = text[: rng.randint(120, 600)]
    text = template.replace("\\n", "\n").format(**slots)
    roll = rng.random()
    if roll < 0.25:
        text += " " + rng.choice(EXTRAS)
    elif roll < 0.4:
        text = rng.choice(OPENERS) + text
    return kind, capitalised(text), slots


def essay_answer(rng: random.Random, s: dict[str, str]) -> str:
    """Three short paragraphs about the subject of the request."""
    subject = s["subject"]
    return (
        f"{capitalised(subject)} is an important topic, and there are several sides to it.\n\n"
        f"First, {subject} affects how people live and work. It can bring many benefits, and it "
        f"has changed over time. Second, there are some challenges. Not everyone agrees about "
        f"{subject}, and good solutions take time and money.\n\nIn conclusion, {subject} will "
        f"stay important in the future. It is worth learning more about it."
    )


def plan_answer(rng: random.Random, s: dict[str, str]) -> str:
    """A numbered plan."""
    subject = s["subject"]
    return f"Here is a simple plan for {subject}:\n\n" + numbered(
        [
            "Set a clear goal and write it down.",
            f"Collect what you need to know about {subject}.",
            "Make a list of the steps and decide what comes first.",
            "Try it out on a small scale and look at the results.",
            "Talk about what went well and improve the plan.",
        ]
    )


def letter_answer(rng: random.Random, s: dict[str, str]) -> str:
    """A short letter."""
    subject = s["work"] if rng.random() < 0.4 else s["subject"]
    return (
        f"Dear {s['recipient']},\n\nI hope you are well. I am writing to you about {subject}. I "
        f"would be grateful if you could take a moment to think about it and tell me what you "
        f"think. I believe that it can be useful for all of us.\n\nThank you for your time.\n\n"
        f"Best regards,\n{s['person']}"
    )


# words of the request -> code that does what is asked; the first match counts
CODE = (
    ("longest ones", "def longest(names, count):\n    return sorted(names, key=len)[-count:]"),
    ("common words", "from collections import Counter\n\n\ndef most_common(path, count):\n"
     "    with open(path) as file:\n        "
     "return Counter(file.read().split()).most_common(count)"),
    ("median", "def median(lists):\n    items = sorted(x for part in lists for x in part)\n"
     "    return items[len(items) // 2]"),
    ("folder", "from pathlib import Path\n\n\ndef words(folder, count):\n    found = []\n"
     "    for path in Path(folder).glob(\"*.txt\"):\n        found += path.read_text().split()\n"
     "    return found[:count]"),
    ("common elements", "def common(a, b):\n    return sorted(set(a) & set(b))"),
    ("path in a tree", "def longest(node):\n    if node is None:\n        return 0\n"
     "    return 1 + max(longest(node.left), longest(node.right))"),
)  # fmt: skip


def code_answer(text: str) -> str:
    """A short program that fits the request, with a plain warning."""
    found = next((code for words, code in CODE if words in text), "")
    language = "python"
    if not found:
        language, what = ("html", "HTML page") if "HTML" in text else ("cpp", "C++ program")
        found = next(code for name, code in snippets() if what in name)
    return (
        f"Here is a simple program as a starting point:\n\n```{language}\n{found}\n```\n\n"
        f"It may not do everything that you need. {SMALL}"
    )


def maths_answer(rng: random.Random, s: dict[str, str]) -> str:
    """No invented result: what to do, and that the model cannot do it."""
    return (
        "Let us think about it step by step.\n\n1. Write down what is known.\n2. Write down what "
        "is asked.\n3. Find a rule or an equation that connects the two.\n4. Solve it and check "
        f"the result.\n\nThis question is too hard for me to solve reliably. {SMALL}"
    )


def text_answer(rng: random.Random, s: dict[str, str]) -> str:
    """The first words of the passage as its gist."""
    gist = " ".join(s["article"].split(".")[0].split()[:14])
    return (
        f'The text begins with "{gist}". It makes a few main points and gives some details.\n\n'
        f"I cannot do more with a long text. {SMALL}"
    )


def open_request(rng: random.Random) -> Exchange:
    """A long request and an answer of its kind."""
    kind, text, s = request(rng)
    if kind == "essay":
        if f"the {s['animal']} and how" in text:
            s = s | {"subject": f"the {s['animal']}"}
        return text, essay_answer(rng, s)
    if kind == "plan":
        return text, plan_answer(rng, s)
    if kind == "story":
        return text, stories.story_text(rng, s["animal"], s["setting"], s["person"])
    if kind == "letter":
        subject = next((s[k] for k in ("work", "subject", "product") if s[k] in text), s["work"])
        return text, letter_answer(rng, s | {"work": subject, "subject": subject})
    if kind == "role":
        who = s["role"] if s["role"] in text else s["animal"]
        return text, stories.role_text(with_article(who), s["subject"])
    if kind == "code":
        return text, code_answer(text)
    return text, maths_answer(rng, s) if kind == "maths" else text_answer(rng, s)


MAKERS: tuple[tuple[float, Maker], ...] = ((7.0, open_request),)
