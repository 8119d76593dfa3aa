"""Grammars to and from protobuf."""

from __future__ import annotations

from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind
from shared.pb.outrider.types.v1 import grammar_pb2 as pb


def grammar_from_message(message: pb.Grammar) -> Grammar:
    """Raises:
    InvalidArgument: the message names no grammar.
    """
    kind = message.WhichOneof("kind")
    if kind == "json_schema":
        return Grammar.of(GrammarKind.JSON_SCHEMA, message.json_schema)
    if kind == "regex":
        return Grammar.of(GrammarKind.REGEX, message.regex)
    if kind == "ebnf":
        return Grammar.of(GrammarKind.EBNF, message.ebnf)
    if kind == "structural_tag":
        return Grammar.of(GrammarKind.STRUCTURAL_TAG, message.structural_tag)
    if kind == "choices":
        return Grammar(GrammarKind.CHOICES, tuple(message.choices.texts))
    raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", "the grammar is of no known kind")


def grammar_message(grammar: Grammar) -> pb.Grammar:
    """Returns the message."""
    if grammar.kind is GrammarKind.CHOICES:
        return pb.Grammar(choices=pb.TextChoices(texts=grammar.source))
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return pb.Grammar(json_schema=grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        return pb.Grammar(regex=grammar.text)
    if grammar.kind is GrammarKind.EBNF:
        return pb.Grammar(ebnf=grammar.text)
    return pb.Grammar(structural_tag=grammar.text)
