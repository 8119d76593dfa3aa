"""A record of every decode step, token by token, for requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.generation import Delta, Round
from shared.text.tokenizer import Tokenizer
from shared.tokens import EMPTY_TREE, TokenTree

MAX_UNSENT_NODES = 8192
"""Nodes of the trees kept for one client, or one answer, until they are sent; about 1 MB."""

Source = Literal["accepted", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class RoundToken:
    """One token of the output.

    Attributes:
        text: what of the output's text it released; the texts of all tokens, and what the end of
            the output adds, are the output as it was generated, reasoning and calls included.
        source: `accepted` from the draft, `bonus` (drawn by the target after a tree was verified)
            or `plain` (drawn in a step without a tree).
    """

    token_id: int
    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class TokenRound:
    """A round with the tokens it added to the output."""

    round: Round
    tokens: tuple[RoundToken, ...]

    @classmethod
    def of(cls, delta: Delta, round_: Round, texts: Sequence[str]) -> TokenRound:
        """Args:
        texts: of the delta's tokens; shorter where a stop string ended the output within them.
        """
        drawn: Source = "bonus" if delta.num_drafted else "plain"
        tokens = (
            RoundToken(token_id, text, "accepted" if place < delta.num_accepted else drawn)
            for place, (token_id, text) in enumerate(zip(delta.token_ids, texts, strict=False))
        )
        return cls(round_, tuple(tokens))


class NodeBudget:
    """Bounds what rounds may keep in memory: past it they go on without their trees."""

    def __init__(self, max_nodes: int = MAX_UNSENT_NODES) -> None:
        self._max_nodes = max_nodes
        self._num_nodes = 0

    def admit(self, round_: Round) -> Round:
        """Returns the round, with its tree if there is room for it."""
        self._num_nodes += len(round_.tree)
        if self._num_nodes <= self._max_nodes:
            return round_
        return replace(round_, tree=EMPTY_TREE, accepted_nodes=())

    def reset(self) -> None:
        """Everything so far has been taken."""
        self._num_nodes = 0


def round_fields(rounds: Sequence[TokenRound], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns rounds as JSON objects; times are in milliseconds."""
    return [_fields(each, tokenizer) for each in rounds]


def _fields(each: TokenRound, tokenizer: Tokenizer) -> dict[str, Any]:
    round_ = each.round
    return {
        "round": round_.number,
        "algorithm": round_.algorithm,
        "rows": round_.num_rows,
        "wait_ms": _milliseconds(round_.wait_s),
        "verify_ms": _milliseconds(round_.verify_s),
        "draft_ms": None if round_.draft_s is None else _milliseconds(round_.draft_s),
        "tree": _tree_fields(round_.tree, tokenizer) if round_.tree.token_ids else None,
        "accepted_nodes": round_.accepted_nodes,
        "tokens": [
            {"id": token.token_id, "text": token.text, "source": token.source}
            for token in each.tokens
        ],
    }


def _tree_fields(tree: TokenTree, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token_ids": tree.token_ids,
        "texts": [tokenizer.decode([each], skip_special_tokens=False) for each in tree.token_ids],
        "parents": tree.parent_indices,
        "log_probs": [round(each, 4) for each in tree.log_probs],
    }


def _milliseconds(duration_s: float) -> float:
    return round(1000.0 * duration_s, 3)
