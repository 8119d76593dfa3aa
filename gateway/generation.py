"""Requests of the gateway to a target and the target's events, as plain data.

A generation is one choice of one HTTP request: one prompt continued once."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shared.generation import Delta, Failed, GenerationParams, PromptScored, RoundTrace, Started
from shared.grammar import Grammar
from shared.text import Tokenizer
from shared.tokens import EMPTY_TREE, FinishReason, TokenTree, WeightChange
from shared.version import package_version

MAX_UNSENT_NODES = 8192
"""Most unsent tree nodes of one answer; about 1 MB."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Generation(GenerationParams):
    """One prompt to continue, for a target.

    Attributes:
        has_seed: whether the seed of `sampling` is used; else the target draws one.
        grammar: constrains the output; None allows any output.
        timeout_s: longest time on a target, queueing included.
    """

    has_seed: bool = False
    grammar: Grammar | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that a target serves, with its limits.

    Attributes:
        name: clients' name of the model.
        max_context_tokens: largest prompt plus output.
        tokenizer_sha256: lower-case hexadecimal.
        draft_algorithms: algorithms of the drafts attached when the target was asked.
        speculation_detail: why no trees are verified; empty while they are.
        output_fingerprint: hash of weights and settings; empty if the target reports none.
        weight_version: version of the current weights.
        weight_changes: the latest changes, oldest first.
    """

    model_id: str
    tokenizer_sha256: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    draft_algorithms: tuple[str, ...] = ()
    speculation_detail: str = ""
    output_fingerprint: str = ""
    weight_version: str = ""
    weight_changes: tuple[WeightChange, ...] = ()
    name: str = ""


class TargetState(enum.Enum):
    """Whether requests may be sent to a target. Only `SERVING` takes them."""

    CONNECTING = "connecting"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    MISMATCHED = "mismatched"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a generation that ended well.

    Attributes:
        stop_token_id: the token that ended the output; None when the length limit did.
        routes: experts of all tokens but the last, little-endian int32; empty unless requested.
    """

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None
    routes: bytes = b""


Event = Started | PromptScored | Delta | Finished | Failed


@dataclass(slots=True)
class NodeBudget:
    """Bounds the memory of unsent rounds: above the bound rounds are kept without their trees.

    Attributes:
        num_nodes: tree nodes of the rounds that have not been taken.
    """

    max_nodes: int = MAX_UNSENT_NODES
    num_nodes: int = 0

    def admit(self, round_: RoundTrace) -> RoundTrace:
        """Returns the round, without its tree if the budget is used up."""
        self.num_nodes += len(round_.tree)
        if self.num_nodes <= self.max_nodes:
            return round_
        return replace(round_, tree=EMPTY_TREE, accepted_nodes=())


def round_fields(
    delta: Delta, round_: RoundTrace, texts: Sequence[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns a round and the tokens it added to the output as a JSON object; times are in
    milliseconds.

    A token's `source` is `accepted` from the draft, `bonus` (drawn by the target after a tree was
    verified) or `plain` (drawn in a step without a tree).

    Args:
        texts: the text that each token released; fewer than the tokens where a stop string ended
            the output. The texts of all tokens and the text held back until the end are together
            the output as generated, reasoning and calls included.
    """
    drawn = "bonus" if delta.num_drafted else "plain"
    draft_s = None if round_.draft is None else round_.draft.response_s
    return {
        "round": round_.round,
        "algorithm": None if round_.draft is None else round_.draft.algorithm,
        "rows": round_.num_rows,
        "wait_ms": _milliseconds(round_.wait_s),
        "verify_ms": _milliseconds(round_.verify_s),
        "draft_ms": None if draft_s is None else _milliseconds(draft_s),
        "tree": _tree_fields(round_.tree, tokenizer) if round_.tree.token_ids else None,
        "accepted_nodes": round_.accepted_nodes,
        "tokens": [
            {
                "id": token_id,
                "text": text,
                "source": "accepted" if index < delta.num_accepted else drawn,
            }
            for index, (token_id, text) in enumerate(zip(delta.token_ids, texts, strict=False))
        ],
    }


def _tree_fields(tree: TokenTree, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token_ids": tree.token_ids,
        "texts": [tokenizer.decode([node], skip_special_tokens=False) for node in tree.token_ids],
        "parents": tree.parent_indices,
        "log_probs": [round(log_prob, 4) for log_prob in tree.log_probs],
    }


def _milliseconds(duration_s: float) -> float:
    return round(1000.0 * duration_s, 3)


@lru_cache(maxsize=64)
def fingerprint(model: TargetModel) -> str:
    """Returns an id that is the same for the same weights, settings, tokenizer and version."""
    weights = (model.output_fingerprint, model.weight_version)
    parts = (package_version(), model.model_id, model.tokenizer_sha256, *weights)
    return f"fp_{hashlib.sha256(':'.join(parts).encode()).hexdigest()[:12]}"
