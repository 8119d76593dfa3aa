"""Arithmetic, calendar, word pairs, lists, definitions and small talk."""

from __future__ import annotations

import random

from shared.demo.recipe.geography import NUMBERS
from shared.demo.recipe.tables import (
    Exchange,
    Maker,
    bulleted,
    capitalised,
    joined,
    lists,
    numbered,
    pick,
    rows,
    with_article,
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    ("January", 31), ("February", 28), ("March", 31), ("April", 30), ("May", 31), ("June", 30),
    ("July", 31), ("August", 31), ("September", 30), ("October", 31), ("November", 30),
    ("December", 31),
)  # fmt: skip

# relation -> (question, alternative question, answer); {a} and {b} are the table's two fields
RELATIONS: dict[str, tuple[str, str, str]] = {
    "opposite": ("What is the opposite of {a}?", "Give me an antonym of {a}.",
                 "The opposite of {a} is {b}."),
    "synonym": ("What is a synonym of {a}?", "Give me another word for {a}.",
                "A synonym of {a} is {b}."),
    "plural": ("What is the plural of {a}?", "How do you write the plural of {a}?",
               "The plural of {a} is {b}."),
    "past": ("What is the past tense of {a}?", "What is the simple past of {a}?",
             "The past tense of {a} is {b}."),
    "sound": ("What sound does a {a} make?", "What does a {a} say?", 'A {a} says "{b}".'),
    "baby": ("What is a baby {a} called?", "What do you call a young {a}?",
             "A baby {a} is called a {b}."),
    "colour": ("What colour is {a}?", "What color is {a}?", "{A} is {b}."),
    "mix": ("What colour do you get if you mix {a}?", "What do {a} make when mixed?",
            "If you mix {a}, you get {b}."),
    "symbol": ("What is the chemical symbol for {a}?", "What is the symbol of {a}?",
               "The chemical symbol for {a} is {b}."),
    "unit": ("How many {a}?", "Tell me how many {a}.", "There are {b} {a}."),
    "wrote": ("Who wrote {a}?", "Who is the author of {a}?", "{a} was written by {b}."),
    "painted": ("Who painted {a}?", "Who is the painter of {a}?", "{b} painted {a}."),
    "invented": ("Who invented {a}?", "Who is the inventor of {a}?", "{b} invented {a}."),
    "discovered": ("Who discovered {a}?", "Who came up with {a}?", "{b} discovered {a}."),
}  # fmt: skip


def arithmetic(rng: random.Random) -> Exchange:
    """One sum, difference, product or quotient of small whole numbers."""
    kind = rng.choice("+++--**/")
    high = rng.choice((10, 10, 20, 50, 100))
    a, b = rng.randint(0, high), rng.randint(0, high)
    if kind == "+":
        word, sign, result = "plus", "+", a + b
    elif kind == "-":
        a, b = max(a, b), min(a, b)
        word, sign, result = "minus", "-", a - b
    elif kind == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        word, sign, result = "times", "*", a * b
    else:
        b, result = rng.randint(1, 12), rng.randint(1, 12)
        a, word, sign = b * result, "divided by", "/"
    question = pick(
        rng,
        f"What is {a} {word} {b}?",
        f"What is {a} {sign} {b}?",
        f"How much is {a} {word} {b}?",
        f"Calculate {a} {sign} {b}.",
        f"{a}{sign}{b}=?",
    )
    spoken = word in question
    return question, f"{a} {word} {b} is {result}." if spoken else f"{a} {sign} {b} = {result}"


def number_fact(rng: random.Random) -> Exchange:
    """Parity, order, neighbours, squares and counting."""
    n, m = rng.randint(1, 99), rng.randint(1, 99)
    kind = rng.randrange(5)
    if kind == 0:
        parity = "even" if n % 2 == 0 else "odd"
        return f"Is {n} even or odd?", f"{n} is {parity}."
    if kind == 1 and n != m:
        return f"Which is larger, {n} or {m}?", f"{max(n, m)} is larger than {min(n, m)}."
    if kind == 2:
        return f"What number comes after {n}?", f"After {n} comes {n + 1}."
    if kind == 3:
        n %= 16
        return f"What is the square of {n}?", f"The square of {n} is {n * n}."
    count = rng.randint(3, 15)
    numbers = ", ".join(str(i) for i in range(1, count + 1))
    return f"Count from 1 to {count}.", f"{numbers}."


def calendar(rng: random.Random) -> Exchange:
    """Days and months: order and length."""
    kind = rng.randrange(5)
    i, j = rng.randrange(7), rng.randrange(12)
    month, length = MONTHS[j]
    if kind == 0:
        return f"What day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."
    if kind == 1:
        return f"What day comes before {DAYS[i]}?", f"{DAYS[i - 1]} comes before {DAYS[i]}."
    if kind == 2:
        leap = " In a leap year it has 29." if j == 1 else ""
        return f"How many days are in {month}?", f"{month} has {length} days.{leap}"
    if kind == 3:
        after = MONTHS[(j + 1) % 12][0]
        return f"What month comes after {month}?", f"{after} comes after {month}."
    if rng.random() < 0.5:
        question = pick(rng, "What are the days of the week?", "List the days of the week.")
        return question, f"The days of the week are {joined(DAYS)}."
    question = pick(rng, "What are the months of the year?", "Name the months of the year.")
    return question, f"The months of the year are {joined([m for m, _ in MONTHS])}."


def relation(rng: random.Random) -> Exchange:
    """One row of the table of pairs (opposites, symbols, authors, translations, ...)."""
    kind, a, b = rng.choice(rows("pairs"))
    if kind.startswith("translate-"):
        language = kind.removeprefix("translate-")
        question = pick(
            rng, f'How do you say "{a}" in {language}?', f'Translate "{a}" to {language}.'
        )
        return question, f'"{capitalised(a)}" in {language} is "{b}".'
    first, second, answer = RELATIONS[kind]
    question = pick(rng, first, second)
    fields = {"a": a, "b": b, "A": capitalised(a)}
    return question.format(**fields), capitalised(answer.format(**fields))


def members(rng: random.Random) -> Exchange:
    """A few members of a kind: fruits, animals, jobs, ..."""
    kind, names = rng.choice(list(lists("members").items()))
    count = rng.choice((2, 3, 3, 3, 4, 5, 5, 6))
    chosen: list[str] = []
    while len(chosen) < min(count, len(names)):
        name = names[min(int(rng.expovariate(0.4)), len(names) - 1)]
        chosen += [] if name in chosen else [name]
    number = str(count) if rng.random() < 0.4 else NUMBERS[count]
    question = pick(
        rng,
        f"Name {number} {kind}.",
        f"List {number} {kind}.",
        f"Give me {number} {kind}.",
        f"Can you name {number} {kind}?",
        f"Give me a list of {number} {kind}.",
        f"What are {number} {kind}?",
        f"Give me some examples of {kind}.",
    )
    if question.startswith(("List", "Give me a list")):
        return question, numbered([capitalised(name) for name in chosen])
    if "some examples" in question:
        return question, f"Here are some {kind}:\n\n" + bulleted(chosen)
    return question, f"{capitalised(NUMBERS[count])} {kind} are {joined(chosen)}."


def is_member(rng: random.Random) -> Exchange:
    """Whether one thing belongs to a kind."""
    table = {k: v for k, v in lists("members").items() if k in ("fruits", "vegetables", "birds",
             "insects", "sports", "metals", "trees", "flowers", "vehicles", "shapes")}  # fmt: skip
    singular = {"fruits": "fruit", "vegetables": "vegetable", "birds": "bird",
                "insects": "insect", "sports": "sport", "metals": "metal", "trees": "tree",
                "flowers": "flower", "vehicles": "vehicle", "shapes": "shape"}  # fmt: skip
    true_kind = rng.choice(list(table))
    asked = true_kind if rng.random() < 0.5 else rng.choice(list(table))
    name = rng.choice(table[true_kind])
    subject = name if true_kind in ("sports", "metals") else with_article(name)
    truth = with_article(singular[true_kind])
    question = f"Is {subject} {with_article(singular[asked])}?"
    if asked == true_kind:
        return question, f"Yes, {subject} is {truth}."
    return question, f"No, {subject} is {truth}."


def definition(rng: random.Random) -> Exchange:
    """A definition in one or two sentences."""
    thing, meaning = rng.choice(rows("definitions"))
    bare = thing.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    question = pick(
        rng,
        f"What is {thing}?",
        f"Explain {thing}.",
        f"Can you explain what {thing} is?",
        f"Define {bare}.",
        f"Tell me about {thing}.",
        f"What does {bare} mean?",
        f"Explain {thing} in simple terms.",
        f"What's {thing}?",
    )
    first, _, rest = meaning.partition(". ")
    return question, f"{capitalised(thing)} is {first}." + (f" {rest}." if rest else "")


def fixed_answer(rng: random.Random) -> Exchange:
    """A question of the hand-written table, in one of its wordings."""
    questions, answer = rng.choice(rows("answers"))
    return pick(rng, *questions.split(" / ")), answer


MAKERS: tuple[tuple[float, Maker], ...] = (
    (3.0, arithmetic),
    (0.8, number_fact),
    (0.8, calendar),
    (3.5, relation),
    (2.0, members),
    (0.6, is_member),
    (3.5, definition),
    (3.5, fixed_answer),
)
