"""The position of one output in its grammar. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvalidArgument
from shared.tokens import TokenTree

if TYPE_CHECKING:
    # A target decodes where it is not installed.
    from llguidance import LLMatcher

_MAX_REASON_CHARACTERS = 500
_MAX_MASKS_S = 0.5  # usually less than a millisecond each
Mask = bytes
"""Bit i of byte i // 8 says whether token i may come next, lowest bit first."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar ready for use, shared by the outputs that must match it."""

    start: LLMatcher

    def matcher(self) -> GrammarMatcher:
        """Returns a matcher before the first token."""
        return GrammarMatcher(self.start)


class GrammarMatcher:
    """Follows one output through its grammar. Owned by the engine thread.

    Attributes:
        failure: why the grammar cannot be followed further: it exceeded a bound of the matcher.
            The output must end.
    """

    def __init__(self, start: LLMatcher) -> None:
        self.failure: InvalidArgument | None = None
        self._start = start
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether nothing can follow: the grammar is complete, or cannot be followed."""
        return self.failure is not None or self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes a committed token, which a mask allowed."""
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._fail(self._matcher.get_error())

    def tree_masks(self, tree: TokenTree) -> list[Mask | None]:
        """Returns the mask of the root's row, then of each node's.

        None stands for a row that must not draw: the grammar forbids its node or an ancestor, or
        the matcher met a bound there.
        """
        begin_s = time.thread_time()
        masks: list[Mask | None] = [None] * (1 + len(tree))
        masks[0] = self._mask()
        taken_s = time.thread_time() - begin_s
        if taken_s > _MAX_MASKS_S:
            self._fail(f"a mask takes {taken_s:.2f} s; at most {_MAX_MASKS_S:g} s are allowed")
            return [None] * len(masks)
        if masks[0] is None:
            self._fail(self._matcher.get_error() or "no token can follow")
            return masks
        path: list[int] = []
        for node in _depth_first(tree):
            parent = tree.parent_indices[node]
            if masks[0 if parent is None else parent + 1] is None:
                continue
            if time.thread_time() - begin_s > _MAX_MASKS_S:
                break
            depth = 0 if parent is None else path.index(parent) + 1
            self._matcher.rollback(len(path) - depth)
            del path[depth:]
            if self._matcher.try_consume_tokens([tree.token_ids[node]]) == 1:
                path.append(node)
                masks[node + 1] = self._mask()
            if self._matcher.is_error():
                self._restore()
                return masks
        self._matcher.rollback(len(path))
        return masks

    def _mask(self) -> Mask | None:
        mask = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() or not any(mask) else mask

    def _restore(self) -> None:
        """Brings the matcher back to the committed tokens; one in error cannot roll back."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        message = (
            f"the grammar cannot be followed beyond {len(self._token_ids)} tokens: "
            f"{shown_reason(reason)}"
        )
        self.failure = InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


def shown_reason(error: str) -> str:
    """Returns what a client should see of an error of llguidance; the rest is its inner state."""
    return error.split("\n<", 1)[0][:_MAX_REASON_CHARACTERS]


def _depth_first(tree: TokenTree) -> Iterator[int]:
    children: dict[int | None, list[int]] = {}
    for node, parent in enumerate(tree.parent_indices):
        children.setdefault(parent, []).append(node)
    waiting = children.get(None, [])[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(children.get(node, ())))
