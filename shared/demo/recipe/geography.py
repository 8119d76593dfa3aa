"""Questions about countries, capitals, continents, languages and currencies."""

from __future__ import annotations

import random

from shared.demo.recipe.tables import Exchange, Maker, capitalised, joined, numbered, pick, rows

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WELL_KNOWN = 40
"""The first rows of the table, which are asked for twice as often as the rest."""


def _country(rng: random.Random) -> tuple[str, ...]:
    table = rows("countries")
    return rng.choice(table[:WELL_KNOWN] if rng.random() < 0.35 else table)


def _bare(country: str) -> str:
    return country.removeprefix("the ")


def capital(rng: random.Random) -> Exchange:
    """The capital of a country."""
    country, city, *_ = _country(rng)
    question = pick(
        rng,
        f"What is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Tell me the capital of {country}.",
        f"Do you know the capital of {country}?",
        f"capital of {_bare(country)}",
        f"What is the capital city of {country}?",
        f"I need to know the capital of {country}.",
    )
    return question, f"The capital of {country} is {city}."


def country_of(rng: random.Random) -> Exchange:
    """The country that a capital belongs to."""
    country, city, *_ = _country(rng)
    question = pick(
        rng,
        f"{city} is the capital of which country?",
        f"Which country has {city} as its capital?",
        f"What country is {city} the capital of?",
        f"Which country is {city} in?",
        f"Where is {city}?",
    )
    if "capital" in question:
        return question, f"{city} is the capital of {country}."
    return question, f"{city} is in {country}. It is the capital of the country."


def country_trait(rng: random.Random) -> Exchange:
    """Continent, language or currency of a country."""
    country, city, continent, language, currency = _country(rng)
    kind = rng.randrange(4)
    if kind == 0:
        question = pick(
            rng, f"Which continent is {country} in?", f"On which continent is {country}?"
        )
        return question, f"{capitalised(country)} is in {continent}."
    if kind == 1:
        question = pick(
            rng,
            f"What language is spoken in {country}?",
            f"Which language do people speak in {country}?",
        )
        return question, f"The main language of {country} is {language}."
    if kind == 2:
        question = pick(
            rng, f"What is the currency of {country}?", f"What money do they use in {country}?"
        )
        return question, f"The currency of {country} is the {currency}."
    question = pick(rng, f"Tell me about {country}.", f"What do you know about {country}?")
    return question, (
        f"{capitalised(country)} is a country in {continent}. Its capital is {city}, its main "
        f"language is {language}, and people pay with the {currency}."
    )


def capital_list(rng: random.Random) -> Exchange:
    """A numbered list of countries with their capitals, the well-known ones first."""
    count = rng.choice((2, 3, 3, 3, 3, 4, 5, 5, 6, 8, 10))
    number = str(count) if rng.random() < 0.6 else NUMBERS[count]
    table = rows("countries")
    where = ""
    pool = list(table[:WELL_KNOWN])
    if rng.random() < 0.25:
        continent = rng.choice(("Europe", "Asia", "Africa", "South America"))
        where = f" in {continent}"
        pool = [row for row in table if row[2] == continent]
    # A geometric draw in table order makes the first countries the usual ones.
    chosen: list[tuple[str, ...]] = []
    while len(chosen) < count:
        row = pool[min(int(rng.expovariate(0.35)), len(pool) - 1)]
        chosen += [] if row in chosen else [row]
    question = pick(
        rng,
        f"List {number} countries{where} and their capitals.",
        f"Name {number} countries{where} and their capitals.",
        f"Give me {number} countries{where} with their capitals.",
        f"Can you list {number} countries{where} and their capital cities?",
        f"Tell me the capitals of {number} countries{where}.",
        f"What are the capitals of {number} countries{where}?",
    )
    lines = [f"{capitalised(country)} - {city}" for country, city, *_ in chosen]
    lead = f"Here are {NUMBERS[count]} countries{where} and their capitals:\n\n"
    return question, lead + numbered(lines)


def country_list(rng: random.Random) -> Exchange:
    """Some countries of one continent."""
    count = rng.choice((2, 3, 3, 4, 5))
    continent = rng.choice(("Europe", "Asia", "Africa", "South America", "North America"))
    pool = [capitalised(row[0]) for row in rows("countries") if row[2] == continent]
    names = rng.sample(pool[:14], count)
    question = pick(
        rng,
        f"Name {NUMBERS[count]} countries in {continent}.",
        f"List {count} countries in {continent}.",
        f"Give me {NUMBERS[count]} {continent} countries.".replace("Europe ", "European "),
    )
    style = pick(rng, f"{capitalised(NUMBERS[count])} countries in {continent} are", "list")
    return question, numbered(names) if style == "list" else f"{style} {joined(names)}."


MAKERS: tuple[tuple[float, Maker], ...] = (
    (5.0, capital),
    (1.5, country_of),
    (2.0, country_trait),
    (2.5, capital_list),
    (0.6, country_list),
)
