"""The parts of a request to and from protobuf: sampling, stop conditions, grammar, trees."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, MutableSequence
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from shared.errors import InvalidArgument
from shared.grammar import Grammar, GrammarKind
from shared.pb.outrider.types.v1 import grammar_pb2, sampling_pb2, token_tree_pb2
from shared.tokens import SamplingParams, StopParams, ThinkingBudget, TokenTree, TreeShape

_GRAMMAR_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "ebnf",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


def sampling_from_message(
    message: sampling_pb2.SamplingParams, *, draw_seed: Callable[[], int]
) -> SamplingParams:
    """Returns the parameters. Fields of the message and of `SamplingParams` have the same names;
    absent fields have their defaults.

    Args:
        draw_seed: called when the message has no seed.

    Raises:
        InvalidArgument: a value is out of range or not a number.
    """
    given = {field.name: _as_field(value) for field, value in message.ListFields()}
    if "seed" not in given:
        given["seed"] = draw_seed()
    return SamplingParams(**given)


def sampling_message(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Returns the message with every field set, the seed included."""
    names = [field.name for field in fields(params)]
    values = {name: getattr(params, name) for name in names}
    values["bad_words"] = [sampling_pb2.TokenRun(token_ids=word) for word in params.bad_words]
    if params.thinking is not None:
        values["thinking"] = sampling_pb2.ThinkingBudget(**asdict(params.thinking))
    return sampling_pb2.SamplingParams(**values)


def _as_field(value: Any) -> Any:
    """Returns the value of a message field in the type of the dataclass field."""
    if isinstance(value, MutableMapping):
        return MappingProxyType(dict(value))
    if isinstance(value, MutableSequence):
        return tuple(
            tuple(item.token_ids) if isinstance(item, sampling_pb2.TokenRun) else item
            for item in value
        )
    if isinstance(value, sampling_pb2.ThinkingBudget):
        start = value.start_token_id if value.HasField("start_token_id") else None
        return ThinkingBudget(value.max_tokens, value.end_token_id, start)
    return value


def stop_from_message(message: sampling_pb2.StopParams, *, max_output_tokens: int) -> StopParams:
    """Returns the parameters, with both bounds cut to `max_output_tokens`.

    Args:
        max_output_tokens: tokens that the context has left, at least 1; also the bound of a message
            without one.

    Raises:
        InvalidArgument: a count is out of range.
    """
    is_bounded = message.HasField("max_output_token_count")
    requested = StopParams(
        max_output_tokens=message.max_output_token_count if is_bounded else max_output_tokens,
        min_output_tokens=message.min_output_token_count,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
    return requested.within(max_output_tokens)


def stop_message(params: StopParams) -> sampling_pb2.StopParams:
    return sampling_pb2.StopParams(
        max_output_token_count=params.max_output_tokens,
        min_output_token_count=params.min_output_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def grammar_from_message(message: grammar_pb2.Grammar) -> Grammar:
    """Raises:
    InvalidArgument: the message names no grammar.
    """
    name = message.WhichOneof("kind")
    if name == "choices":
        return Grammar(GrammarKind.CHOICES, tuple(message.choices.texts))
    for kind, field in _GRAMMAR_FIELDS.items():
        if field == name:
            return Grammar.of(kind, getattr(message, field))
    raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", "the grammar is of no known kind")


def grammar_message(grammar: Grammar) -> grammar_pb2.Grammar:
    if grammar.kind is GrammarKind.CHOICES:
        return grammar_pb2.Grammar(choices=grammar_pb2.TextChoices(texts=grammar.source))
    message = grammar_pb2.Grammar()
    setattr(message, _GRAMMAR_FIELDS[grammar.kind], grammar.text)
    return message


def tree_from_message(message: token_tree_pb2.TokenTree) -> TokenTree:
    """Returns the tree.

    Raises:
        InvalidArgument: it is malformed, or a log probability is not a finite number.
    """
    # A slice copies a repeated field in one call; iteration costs a call per element.
    parents, log_probs = message.parent_indices[:], message.log_probs[:]
    if parents and min(parents) < -1:
        raise InvalidArgument.malformed_tree(f"parent index {min(parents)} is below -1")
    if not math.isfinite(sum(log_probs)):
        raise InvalidArgument.malformed_tree("a log probability is not finite")
    return TokenTree(
        tuple(message.token_ids[:]),
        tuple([None if parent == -1 else parent for parent in parents]),
        tuple(log_probs),
    )


def tree_message(tree: TokenTree) -> token_tree_pb2.TokenTree:
    return token_tree_pb2.TokenTree(
        token_ids=tree.token_ids,
        parent_indices=[-1 if parent is None else parent for parent in tree.parent_indices],
        log_probs=tree.log_probs,
    )


def shape_from_message(message: token_tree_pb2.TreeShape) -> TreeShape:
    """Raises:
    InvalidArgument: a number is out of range, or the shape has no room for a node.
    """
    shape = TreeShape(message.step_count, message.topk, message.draft_token_count)
    if not shape.num_steps:
        raise InvalidArgument.out_of_range("num_steps", 0, "[1, 32]")
    if not shape.max_node_count:
        raise InvalidArgument.out_of_range("num_draft_tokens", 1, "[2, 257]")
    return shape


def shape_message(shape: TreeShape) -> token_tree_pb2.TreeShape:
    return token_tree_pb2.TreeShape(
        step_count=shape.num_steps, topk=shape.topk, draft_token_count=shape.num_draft_tokens
    )
