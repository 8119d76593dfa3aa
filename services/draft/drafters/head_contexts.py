"""The committed rows of sequences in a draft head, computed from the target's features.

Rows wait for their features; what is computed slides with the window when a sequence outgrows the
head's context. See `HeadKv` for what a row is.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.draft.drafters.draft_kv import BranchKv, BranchPages, SequenceKv, Tail, TreeTail
from services.draft.drafters.outcome_drafter import TailWork, learn_rows
from services.draft.drafters.whole_trees import pass_sampling
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.kv.upload import uploaded_pairs
from shared.runtime.host_copy import joined_rows
from shared.runtime.runner import HeadOutput, HeadRunner
from shared.runtime.tree_pass import OpenSequence
from shared.speculation.tree import BeamRows

# Feature rows of one sequence that the draft head has not used up.


class FeatureBuffer:
    """Rows of the positions `[start, end)`, in the pieces they came in.

    Attributes:
        end: the position after the last row that ever came.
    """

    __slots__ = ("_pieces", "end")

    def __init__(self) -> None:
        # With the positions that each begins and ends at: a tensor is slow to tell its length.
        self._pieces: deque[tuple[int, int, Tensor]] = deque()
        self.end = 0

    @property
    def start(self) -> int:
        """The first position held; `end` when none is."""
        return self._pieces[0][0] if self._pieces else self.end

    def append(self, rows: FeatureRows) -> None:
        """Takes rows in; those it has had already are left out. After a gap everything before it
        is dropped, because a head cannot step over a position."""
        start, piece = rows.position_offset, rows.rows
        end = start + piece.shape[0]
        if start > self.end:
            self._pieces.clear()
        elif start < self.end:
            start, piece = self.end, piece[self.end - start :]
        if end > start:
            self._pieces.append((start, end, piece))
        self.end = max(start, end)

    def drop_before(self, position: int) -> None:
        """Frees pieces that end at `position` or before it."""
        while self._pieces and self._pieces[0][1] <= position:
            self._pieces.popleft()

    def read(self, start: int, count: int) -> Iterator[Tensor]:
        """Yields the rows of `[start, start + count)`, piece by piece; all must be held."""
        end = start + count
        assert self.start <= start <= end <= self.end, "these rows are not here"
        for first, last, piece in self._pieces:
            if end <= first:
                return
            if start <= first and last <= end:
                yield piece
            elif start < last:
                yield piece[max(start - first, 0) : end - first]


_TOKEN_BITS = 32
_DIGEST_BYTES = 16


class HeadKv:
    """Opens, slides and closes the KV of sequences over one page pool.

    The *row* of position p reads the token after p and the target's features of p, so N committed
    tokens make N - 1 rows. *Index* counts rows from the sequence's window, as in `draft_kv`;
    committed rows take the indices `[0, num_computed)`, the rows of a growing tree follow them as
    its tail. Tree rows are computed from the head's own states, not from features, so none of them
    is kept: once a verdict commits their tokens, they are computed again.

    A sequence that outgrows the head's context starts over with the younger half of it, if the
    features of that half are still there.
    """

    def __init__(self, leases: KvLeases, *, max_context_tokens: int, margin_tokens: int) -> None:
        """`margin_tokens` of the context stay free for the tree."""
        assert max_context_tokens > margin_tokens + 1, "no room for a context beside the tree"
        self.leases = leases
        self._max_window_rows = max_context_tokens - margin_tokens
        self._branches = BranchPages(leases, max_context_tokens=max_context_tokens)

    @property
    def num_kept_rows(self) -> int:
        """Rows a window starts over with."""
        return max(self._max_window_rows // 2, 1)

    def open(self, sequence: DraftSequence) -> SequenceKv:
        """Starts a sequence on the longest cached prefix of its window."""
        num_rows = sequence.num_tokens - 1
        is_long = num_rows > self._max_window_rows
        return self._open_at(sequence, num_rows - self.num_kept_rows if is_long else 0)

    def restart(self, kv: SequenceKv, sequence: DraftSequence, window_start: int) -> SequenceKv:
        """Gives the window up for one that starts at the row of position `window_start`."""
        self.close(kv, sequence)
        return self._open_at(sequence, window_start)

    def is_outgrown(self, kv: SequenceKv, sequence: DraftSequence) -> bool:
        return num_window_rows(kv, sequence) > self._max_window_rows

    def reserve(self, kv: SequenceKv, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Whether the window and a tree of that many rows fit; nothing changed if not."""
        return self.leases.try_grow(kv.lease, num_window_rows(kv, sequence) + num_tail_rows)

    def branch(self, kv: SequenceKv, path: Sequence[int], num_rows: int) -> BranchKv | None:
        """Returns pages for a row and a tree behind a path of tree rows, see `BranchPages`."""
        pages = kv.lease.pages
        return self._branches.branch(kv.lease, pages, kv.num_computed, path, num_rows)

    def take_moves(self) -> list[tuple[int, int]]:
        """See `BranchPages.take_moves`."""
        return self._branches.take_moves()

    def publish(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        """Shares the computed rows with other sequences, once."""
        if not kv.is_published:
            kv.is_published = True
            self.leases.publish(kv.lease, _row_keys(sequence, kv.window_start, kv.num_computed))

    def close(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        self.leases.close(kv.lease, _row_keys(sequence, kv.window_start, kv.num_computed))

    def _open_at(self, sequence: DraftSequence, window_start: int) -> SequenceKv:
        num_rows = max(sequence.num_tokens - 1 - window_start, 0)
        keys = _row_keys(sequence, window_start, num_rows)
        lease = self.leases.open(keys, sequence.cache_salt)
        return SequenceKv(lease, window_start, lease.num_cached_tokens)


def num_window_rows(kv: SequenceKv, sequence: DraftSequence) -> int:
    """Returns the committed rows from the window's start on, computed or not."""
    return max(sequence.num_tokens - 1 - kv.window_start, 0)


def _row_keys(sequence: DraftSequence, window_start: int, count: int) -> list[int]:
    """Returns what the prefix cache knows each row by.

    A row depends on its own token, through the features, and on the one after it, so a key holds
    both. Features depend on every earlier token, too: the first row of a window that starts in the
    middle is known by a digest of all of them. The features of a probe are its caller's, so its
    rows are not for others and the other way round: they have no keys.
    """
    if sequence.is_probe:
        return []
    tokens = sequence.token_ids[window_start : window_start + count + 1]
    keys = [a << _TOKEN_BITS | b for a, b in itertools.pairwise(tokens)]
    if keys and window_start:
        before = array("q", sequence.token_ids[: window_start + 2]).tobytes()
        digest = hashlib.blake2b(before, digest_size=_DIGEST_BYTES).digest()
        keys[0] = int.from_bytes(digest, "little")
    return keys


@dataclass(slots=True, eq=False)
class _Context:
    """The computed rows of a sequence and the features for the rows to come."""

    kv: SequenceKv
    features: FeatureBuffer = field(default_factory=FeatureBuffer)

    @property
    def next_position(self) -> int:
        """The first position whose row is not computed."""
        return self.kv.window_start + self.kv.num_computed


class HeadContexts:
    """Opens, fills, slides and closes the contexts of sequences.

    Args:
        margin_tokens: of `max_context_tokens`, kept free for a tree.
        keeps_features: hold on to the features a sliding window starts over with; needed where
            the target's context is longer than the draft's.
        min_rows: committed rows that a tree needs.
    """

    def __init__(
        self,
        runner: HeadRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        margin_tokens: int,
        keeps_features: bool,
        min_rows: int,
    ) -> None:
        self.leases = leases
        self._runner = runner
        self._keeps_features = keeps_features
        self._min_rows = min_rows
        self._kv = HeadKv(
            leases, max_context_tokens=max_context_tokens, margin_tokens=margin_tokens
        )
        self._contexts: dict[SequenceKey, _Context] = {}

    def open(self, sequence: DraftSequence) -> None:
        """Starts a sequence on the longest cached prefix of its window."""
        self._contexts[sequence.key] = _Context(self._kv.open(sequence))

    def close(self, sequence: DraftSequence) -> None:
        """Frees a sequence's pages; its rows stay cached."""
        self._kv.close(self._contexts.pop(sequence.key).kv, sequence)

    def kv_of(self, sequence: DraftSequence) -> SequenceKv:
        """Returns the pages of a sequence and what is computed in them."""
        return self._contexts[sequence.key].kv

    def slide(self, sequence: DraftSequence) -> bool:
        """Starts over with the younger half of a context that is outgrown, as far back as there
        are features; returns whether it was."""
        context = self._contexts[sequence.key]
        is_outgrown = self._kv.is_outgrown(context.kv, sequence)
        if is_outgrown:
            start = sequence.num_tokens - 1 - self._kv.num_kept_rows
            self._restart(sequence, max(start, context.features.start))
        return is_outgrown

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> bool:
        """Takes rows in; True when the context had to start over at the first of them."""
        context = self._contexts[sequence.key]
        context.features.append(rows)
        has_gap = context.features.start > context.next_position
        if has_gap:
            # The target cannot send what came before, so that is no part of the context.
            self._restart(sequence, context.features.start)
        self.drop_features(sequence)
        return has_gap

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the committed rows that are not computed but whose features are here."""
        context = self._contexts[sequence.key]
        end = min(context.features.end, sequence.num_tokens - 1)
        return max(end - context.next_position, 0)

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether the features of every committed position but the last are here, some are not
        computed from, and there are rows enough for a tree."""
        kv, backlog = self.kv_of(sequence), self.backlog(sequence)
        num_rows = num_window_rows(kv, sequence)
        return num_rows >= self._min_rows and 0 < backlog == num_rows - kv.num_computed

    def reserve(self, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Makes room for the committed rows and a tree; False, with nothing changed, if there is
        none."""
        return self._kv.reserve(self.kv_of(sequence), sequence, num_tail_rows)

    def publish(self, sequence: DraftSequence) -> None:
        """Shares the computed rows with other sequences, once."""
        self._kv.publish(self.kv_of(sequence), sequence)

    def compute(
        self, counts: Sequence[tuple[DraftSequence, int]], *, with_logits: bool
    ) -> HeadOutput:
        """Computes the next rows of each sequence.

        Args:
            with_logits: of the last row of each.
        """
        hidden = self.hidden(counts)
        rows = [self._next_rows(*each, with_logits=with_logits) for each in counts]
        output = self.run(rows, hidden)
        for sequence, _ in counts:
            self.drop_features(sequence)
        return output

    def hidden(self, counts: Sequence[tuple[DraftSequence, int]]) -> Tensor:
        """Returns the fused features of the next rows of each sequence, end to end."""
        return self._runner.fuse(joined_rows(self.features(counts), self._runner.device))

    def features(self, counts: Sequence[tuple[DraftSequence, int]]) -> list[Tensor]:
        """Returns the features `[any, W]` of the next rows of each sequence, piece by piece."""
        return [
            piece
            for sequence, count in counts
            for context in [self._contexts[sequence.key]]
            for piece in context.features.read(context.next_position, count)
        ]

    def open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        """Lays out all committed rows that are left and counts them as computed."""
        context = self._contexts[sequence.key]
        kv, start = context.kv, context.kv.num_computed
        kv.num_computed, kv.tail = num_window_rows(kv, sequence), None
        return OpenSequence(
            token_ids=sequence.token_ids[kv.window_start + start + 1 :],
            num_computed=start,
            num_before=kv.window_start,
            sampling=pass_sampling(sequence),
            pages=kv.lease.pages,
        )

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages for what may follow tree rows behind all committed ones, see
        `HeadKv.branch`."""
        assert behind is None, "a head goes on from features, never from a branch"
        return self._kv.branch(self.kv_of(sequence), path, num_rows)

    def branch_sequence(
        self, sequence: DraftSequence, branch: BranchKv, token_id: int
    ) -> OpenSequence:
        """Lays out the row of the token that ends the verdict of a branch."""
        num_before = self.kv_of(sequence).window_start
        return branch.sequence(token_id, num_before=num_before, sampling=pass_sampling(sequence))

    def move(self) -> None:
        """Moves the keys and values that wait to be, which is due before a branch is computed."""
        moves = self._kv.take_moves()
        if moves:
            self._runner.pool.move(*uploaded_pairs(moves, self._runner.device))

    def run(self, rows: Sequence[SequenceRows], hidden: Tensor) -> HeadOutput:
        """Computes rows of any kind from the hidden states they read."""
        runner = self._runner
        batch = build_batch(rows, page_size=runner.page_size, device=runner.device)
        return runner.run(batch, hidden)

    def drop_features(self, sequence: DraftSequence) -> None:
        """Frees the features that neither the next rows nor a window to come needs."""
        context = self._contexts[sequence.key]
        needed = context.next_position
        if self._keeps_features:
            needed = min(needed, sequence.num_tokens - 1 - self._kv.num_kept_rows)
        context.features.drop_before(needed)

    def gauges(self) -> Mapping[str, float]:
        """See `Drafter.gauges`."""
        leases = self.leases
        buffers = [context.features for context in self._contexts.values()]
        return {
            "page_count": float(leases.num_pages),
            "free_page_count": float(leases.num_free_pages),
            "cached_page_count": float(leases.num_cached_pages),
            "held_page_count": float(leases.num_held_pages),
            "held_feature_row_count": float(sum(each.end - each.start for each in buffers)),
        }

    def _next_rows(self, sequence: DraftSequence, count: int, *, with_logits: bool) -> SequenceRows:
        """Lays out the next `count` rows and counts them as computed."""
        context = self._contexts[sequence.key]
        start, first_token = context.kv.num_computed, context.next_position + 1
        context.kv.num_computed += count
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count],
            start,
            context.kv.lease.pages,
            (count - 1,) if with_logits else (),
        )

    def _restart(self, sequence: DraftSequence, window_start: int) -> None:
        context = self._contexts[sequence.key]
        context.kv = self._kv.restart(context.kv, sequence, window_start)


# Drafted subtrees of a recurrent head: rows behind the committed tokens, and rows ahead of
# verdicts.
#
# A node's row reads the state that its parent's row left; below the last committed token that is
# the state of the committed row, which is computed from the target's features.


class HeadTails:
    """Keeps and computes the tails of every sequence of one drafter."""

    def __init__(self, contexts: HeadContexts, device: torch.device) -> None:
        self._contexts = contexts
        self._device = device

    def tail_of(self, sequence: DraftSequence) -> Tail | None:
        """None when features are missing: then what was verified cannot be computed."""
        kv = self._contexts.kv_of(sequence)
        is_computed = kv.num_computed == num_window_rows(kv, sequence)
        return kv.tail if is_computed or self._contexts.is_complete(sequence) else None

    def keep(
        self,
        sequences: Sequence[DraftSequence],
        tails: Sequence[TreeTail],
        outputs: Sequence[HeadOutput],
    ) -> None:
        """Keeps the rows and states of trees that were just grown, level by level."""
        levels = [each.states.view(len(tails), -1, each.states.shape[1]) for each in outputs]
        for place, (sequence, tail) in enumerate(zip(sequences, tails, strict=True)):
            tail.keep_states([level[place].unbind() for level in levels])
            self._contexts.kv_of(sequence).tail = tail.tail

    def compute(self, work: Sequence[TailWork]) -> list[DraftSequence]:
        """Computes nodes, one forward for all sequences; before that the tokens that a verdict
        committed. Returns the sequences it had memory for."""
        served = [each for each in work if self._has_room(each)]
        if not served:
            return []
        due = [each for each in served if self._is_root_due(each)]
        if due:
            self._compute_roots(due)
        self._compute_nodes(served)
        return [each.sequence for each in served]

    def _is_root_due(self, work: TailWork) -> bool:
        """Whether a verdict committed tokens that are not computed."""
        return self._contexts.backlog(work.sequence) > 0

    def _compute_roots(self, work: Sequence[TailWork]) -> None:
        counts = [(each.sequence, self._contexts.backlog(each.sequence)) for each in work]
        output = self._contexts.compute(counts, with_logits=True)
        for each in work:
            each.tail.base = self._contexts.kv_of(each.sequence).num_computed
        self._learn([replace(each, nodes=[each.tail.root]) for each in work], output)

    def _compute_nodes(self, work: Sequence[TailWork]) -> None:
        states = [
            node.parent.state
            for each in work
            for node in each.nodes
            if node.parent is not None and node.parent.state is not None
        ]
        rows = [
            each.tail.lay_out(each.nodes, self._contexts.kv_of(each.sequence).lease.pages)
            for each in work
        ]
        self._learn(work, self._contexts.run(rows, torch.stack(states)))

    def _learn(self, work: Sequence[TailWork], output: HeadOutput) -> None:
        learn_rows(work, output.logits, self._device)
        nodes = [node for each in work for node in each.nodes]
        for node, state in zip(nodes, output.states.unbind(), strict=True):
            node.state = state

    def _has_room(self, work: TailWork) -> bool:
        kv = self._contexts.kv_of(work.sequence)
        num_rows = num_window_rows(kv, work.sequence) + work.tail.num_rows + len(work.nodes)
        return self._contexts.leases.try_grow(kv.lease, num_rows)


def reroot(kv: SequenceKv, token_ids: Sequence[int]) -> None:
    """Keeps what was drafted ahead below the committed tokens, but none of its rows."""
    path = [] if kv.tail is None else kv.tail.match(token_ids)
    if kv.tail is None or len(path) < len(token_ids):
        kv.tail = None
    else:
        kv.tail.reroot(path[-1])
        kv.tail.forget_rows()


# The rows of one sequence in each layer of a head of several next-token layers.
#
# *Row i* of layer k reads the token at i + 1 + k and the state of row i of layer k - 1, so each
# layer has one committed row fewer than the one before it, and the rows of a tree follow them. A
# node's row reads the state that its parent left in the layer before; the root's is the last
# committed row.


class LayerRows:
    """Lays out the committed rows that are still open, and a growing tree, for every layer.

    Attributes:
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, kv: SequenceKv, token_ids: Sequence[int]) -> None:
        """`token_ids` are all committed tokens of the sequence."""
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = kv.lease.pages
        self._start = kv.num_computed
        self._tokens = token_ids[kv.window_start + kv.num_computed + 1 :]
        self._tree_tokens: list[int] = []
        self._parents: list[int | None] = []
        self._depths: list[int] = []
        self._visible: list[Sequence[bool]] = []
        self._beam_rows: list[int | None] = [None]

    def num_committed(self, layer: int) -> int:
        """Returns the open committed rows of a layer."""
        return len(self._tokens) - layer

    def add_beam(self, beam: BeamRows) -> None:
        """Takes the next beam of the tree."""
        token_ids, parents = beam.token_ids, beam.parents
        first, depth = len(self._tree_tokens), len(self.paths[0]) + 1
        self._parents += [self._beam_rows[place] for place in parents]
        self._tree_tokens += token_ids
        self._depths += [depth] * len(token_ids)
        self._visible += beam.visible
        self._beam_rows = list(range(first, first + len(token_ids)))
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]

    def all_rows(self, layer: int) -> SequenceRows:
        """Returns the open committed rows of a layer, then every node so far."""
        base = self.num_committed(layer)
        return SequenceRows(
            token_ids=[*self._tokens[layer:], *self._tree_tokens],
            positions=[
                *range(self._start, self._start + base),
                *(self._start + base - 1 + depth for depth in self._depths),
            ],
            kv_start=self._start,
            pages=self._pages,
            prefix_length=self._start,
            tail_mask=self._whole_mask(base) if self._has_siblings else None,
            logit_rows=(),
        )

    def sources(self, layer: int) -> list[int]:
        """Returns, for each of `all_rows(layer)`, the row among `all_rows(layer - 1)` whose state
        it reads."""
        base = self.num_committed(layer - 1)
        root = base - 1
        nodes = [root if parent is None else base + parent for parent in self._parents]
        return [*range(self.num_committed(layer)), *nodes]

    def beam_rows(self, layer: int) -> SequenceRows:
        """Returns the last beam's rows alone; the layer has computed all before them."""
        num_rows = len(self.paths)
        base = self._start + self.num_committed(layer)
        return SequenceRows(
            token_ids=self._tree_tokens[-num_rows:],
            positions=[base - 1 + depth for depth in self._depths[-num_rows:]],
            kv_start=base + len(self._tree_tokens) - num_rows,
            pages=self._pages,
            prefix_length=base,
            tail_mask=self._visible[-num_rows:] if self._has_siblings else None,
            logit_rows=(),
        )

    @property
    def _has_siblings(self) -> bool:
        """Whether causality is not the whole truth."""
        return len(self.paths) > 1

    def _whole_mask(self, base: int) -> list[list[bool]]:
        width = len(self._tree_tokens)
        committed = [[i <= row for i in range(base)] + [False] * width for row in range(base)]
        nodes = [
            [True] * base + [*visible, *[False] * (width - len(visible))]
            for visible in self._visible
        ]
        return committed + nodes
