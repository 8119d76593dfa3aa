"""The position of one output in its grammar. No torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgument
from shared.tokens import TokenTree

if TYPE_CHECKING:
    # A target without llguidance can still serve requests without grammars.
    from llguidance import LLExecutor, LLMatcher

_MAX_REASON_CHARACTERS = 500
_MAX_MASKS_S = 0.5  # usually less than a millisecond each
_NUM_THREADS = 4
_WORD_BITS = 32
Masks = NDArray[np.int32]
"""One row per tree row: bit i % 32 of word i // 32 says whether token i may come next."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar ready for use, shared by the outputs that must match it.

    Attributes:
        start: a matcher before the first token, which is copied.
        num_tokens: number of tokens of its tokenizer.
    """

    start: LLMatcher
    num_tokens: int

    def matcher(self) -> GrammarMatcher:
        """Returns a matcher before the first token."""
        return GrammarMatcher(self.start, -(-self.num_tokens // _WORD_BITS))


class GrammarMatcher:
    """Follows one output through its grammar. Owned by the engine thread.

    Attributes:
        failure: why the grammar cannot be followed further, for example because it exceeded a bound
            of the matcher; the output must end then. None while it can be followed.
        num_words: words of a mask; see `Masks`.
    """

    def __init__(self, start: LLMatcher, num_words: int) -> None:
        self.failure: InvalidArgument | None = None
        self.num_words = num_words
        self._start = start
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether no token can follow: the grammar is complete, or cannot be followed further."""
        return self.failure is not None or self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes a committed token, which a mask allowed."""
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._fail(self._matcher.get_error())

    @property
    def inner(self) -> LLMatcher:
        """The matcher at the last committed token; the caller must leave it there."""
        return self._matcher

    def repair_masks(self, masks: Masks) -> None:
        """Repairs the masks of a path if the matcher met a bound. The last mask it wrote may be
        wrong, so it is cleared; the root's mask is computed again by a restored matcher."""
        if not self._matcher.is_error():
            return
        written = np.flatnonzero(masks.any(axis=1))
        last = int(written[-1]) if len(written) else 0
        masks[last] = 0
        if last == 0:
            self._restore()
            root = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                masks[0] = np.frombuffer(root, np.int32, self.num_words)

    def finish_tree(self, root: Masks) -> None:
        """Ends the computation of a tree's masks: restores a matcher in error, or fails the grammar
        if the mask of the root allows no token."""
        if root.any():
            if self._matcher.is_error():
                self._restore()
        elif self.failure is None:
            self._fail(self._matcher.get_error() or "no token can follow")

    def check_time(self) -> None:
        """Fails a grammar whose next mask takes too long."""
        begin_s = time.thread_time()
        self._matcher.compute_bitmask()
        elapsed_s = time.thread_time() - begin_s
        if elapsed_s > _MAX_MASKS_S:
            self._fail(f"a mask takes {elapsed_s:.2f} s; at most {_MAX_MASKS_S:g} s are allowed")

    def _restore(self) -> None:
        """Returns to the committed tokens with a new matcher; one in error cannot roll back."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        message = (
            f"the grammar cannot be followed beyond {len(self._token_ids)} tokens: "
            f"{shown_reason(reason)}"
        )
        self.failure = InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


def shown_reason(error: str) -> str:
    """Returns the part of an llguidance error that clients should see; the rest is its state."""
    return error.split("\n<", 1)[0][:_MAX_REASON_CHARACTERS]


class MaskedTree(NamedTuple):
    """A tree, the matcher at its root, and the row of the root's mask among those of all trees; the
    nodes' rows follow."""

    matcher: GrammarMatcher
    tree: TokenTree
    first_row: int

    @property
    def rows(self) -> slice:
        """The rows of root and nodes."""
        return slice(self.first_row, self.first_row + 1 + len(self.tree))


class _Path(NamedTuple):
    """One path of a tree, as nodes below the root."""

    masked: MaskedTree
    nodes: list[int]

    @property
    def is_in_order(self) -> bool:
        """Whether its nodes are the first of the tree, so that their rows follow the root's."""
        return self.nodes == list(range(len(self.nodes)))


class MaskExecutor:
    """Computes masks of many matchers in parallel, without the GIL. Owned by the engine thread."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, trees: SequenceOf[MaskedTree], masks: Masks) -> None:
        """Writes the masks of trees to their rows.

        A row of zeros must not draw: the grammar forbids its node or an ancestor, or the matcher
        met a bound there.

        Args:
            masks: written in the rows of the trees alone; contiguous.
        """
        for masked in trees:
            masks[masked.rows] = 0
        tree_paths = [_paths(masked.tree) for masked in trees]
        # One path of each tree at a time, because a matcher has only one position.
        for turn in range(max(map(len, tree_paths), default=0)):
            paths = [
                _Path(masked, own[turn])
                for masked, own in zip(trees, tree_paths, strict=True)
                if turn < len(own) and not masked.matcher.inner.is_error()
            ]
            self._compute(paths, masks)
        for masked in trees:
            masked.matcher.finish_tree(masks[masked.first_row])

    def _compute(self, paths: SequenceOf[_Path], masks: Masks) -> None:
        """Computes the masks on one path of each tree."""
        begin_s = time.monotonic()
        in_order = [path for path in paths if path.is_in_order]
        self._run(in_order, [path.masked.first_row for path in in_order], masks)
        # The executor writes the rows of a path one behind the other.
        scattered = [path for path in paths if not path.is_in_order]
        *starts, num_rows = itertools.accumulate(
            (1 + len(path.nodes) for path in scattered), initial=0
        )
        rows = np.zeros((num_rows, masks.shape[1]), np.int32)
        self._run(scattered, starts, rows)
        if time.monotonic() - begin_s > _MAX_MASKS_S:
            for path in paths:
                path.masked.matcher.check_time()
        for path in in_order:
            first = path.masked.first_row
            _repair(path, masks[first : first + 1 + len(path.nodes)])
        for path, start in zip(scattered, starts, strict=True):
            first, own = path.masked.first_row, rows[start : start + 1 + len(path.nodes)]
            _repair(path, own)
            masks[[first, *(first + 1 + node for node in path.nodes)]] = own

    def _run(self, paths: SequenceOf[_Path], starts: SequenceOf[int], rows: Masks) -> None:
        """Writes the masks on each path to rows from its start on."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=_NUM_THREADS)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for (masked, nodes), start in zip(paths, starts, strict=True):
            assert masked.matcher.num_words == rows.shape[1], "masks of another vocabulary"
            if nodes:
                tokens = [masked.tree.token_ids[node] for node in nodes]
                drafted.append((masked.matcher.inner, start, tokens))
            else:
                plain.append((masked.matcher.inner, start))
        output = (rows.ctypes.data, rows.itemsize * rows.shape[1], len(rows))
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *output)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *output)


def _repair(path: _Path, masks: Masks) -> None:
    """See `GrammarMatcher.repair_masks`; clears the masks of a grammar that has failed."""
    matcher = path.masked.matcher
    if matcher.failure is None:
        matcher.repair_masks(masks)
    else:
        masks[:] = 0


def _paths(tree: TokenTree) -> list[list[int]]:
    """Returns the nodes below the root on the path to each leaf; [[]] for an empty tree."""
    leaves = set(range(len(tree))) - set(tree.parent_indices)
    return [list(tree.path(leaf)) for leaf in sorted(leaves)] or [[]]
