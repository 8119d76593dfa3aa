"""The draft model in rounds on the device: its trees, also those that were grown elsewhere, and the
rows that its cache lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers, uploaded_pairs
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.round_batches import (
    RoundBatches,
    RoundShape,
    RoundTree,
    SizedShape,
    StateSizes,
    state_of_shape,
)
from shared.runtime.round_graphs import TreeSource, num_computed
from shared.runtime.round_state import RoundSampling, RoundState
from shared.runtime.round_verification import RoundVerification
from shared.runtime.tree_draft import DraftCode, grown
from shared.runtime.tree_model import RoundModel, runs_fused
from shared.speculation.tree import NO_TOKEN, TreeRows, rows_of_parents
from shared.tokens import TreeShape

# Trees that were grown elsewhere, as the first part of a round.


def read_trees(
    trees: Tensor, state: RoundState, batches: RoundBatches, vocab_size: int
) -> RoundTree:
    """Returns the trees of the slots of a state, read once.

    Args:
        trees: `[at least S, 2, T]` int64, tokens and parents, see `TreeRows`.
        vocab_size: of the target.
    """
    if runs_fused(batches.shape, trees.device):
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_fused import read_trees_fused

        return read_trees_fused(trees, state, batches, vocab_size)
    token_ids, parents = trees[: state.num_slots].clone().unbind(1)
    tree = batches.shape.tree
    rows = mended_rows(token_ids, parents, state.roots, tree, vocab_size=vocab_size)
    return batches.of_trees(state, rows)


def mended_rows(
    token_ids: Tensor, parents: Tensor, roots: Tensor, shape: TreeShape, *, vocab_size: int
) -> TreeRows:
    """Returns trees that others wrote, as trees of a shape: a node that is none is left out.

    A token is in the vocabulary, a parent comes before its children, no node is deeper than the
    shape, and of siblings with one token the first counts. In a chain each row is the parent of the
    next, whatever was written: the target computes chains as runs of tokens.

    Args:
        token_ids, parents: `[S, T]` int64, see `TreeRows`; column 0 is not read.
        roots: `[S]` int64.
    """
    max_depth = shape.num_steps
    rows = torch.arange(token_ids.shape[1], device=token_ids.device)
    before = (rows - 1).clamp_min(0)
    parents = torch.minimum(parents.clamp_min(0), before)
    if shape.topk == 1:
        parents = before.repeat(len(parents), 1)
    ancestors = parents
    for _ in range(max_depth - 1):
        ancestors = parents.gather(1, ancestors)
    is_node = (token_ids >= 0) & (token_ids < vocab_size) & (ancestors == 0)
    same = token_ids.unsqueeze(2) == token_ids.unsqueeze(1)
    same &= parents.unsqueeze(2) == parents.unsqueeze(1)
    same &= is_node.unsqueeze(1) & ((rows < rows.unsqueeze(1)) & (rows > 0))
    tokens = torch.where(is_node & ~same.any(dim=2), token_ids, NO_TOKEN)
    tokens = torch.cat((roots.unsqueeze(1), tokens[:, 1:]), dim=1)
    return rows_of_parents(tokens, parents, max_depth)


_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class HeadBacklog:
    """Rows that one sequence lacks in the head's cache.

    Attributes:
        token_ids: committed; the row of position p reads the token after it.
        start: the first row that is missing.
        end: the row behind the last one that is caught up with: a round computes the open ones.
        pages: the target's, where the features are.
        head_pages: the head's.
        slot: of the sequence.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    pages: Sequence[int]
    head_pages: Sequence[int]
    slot: int = 0

    @property
    def num_rows(self) -> int:
        return max(self.end - self.start, 0)


class CatchUp:
    """Computes rows in the cache of one draft model, those of all sequences together.

    Args:
        features: returns the rows `[N, W]` at slots `[N]` of the target's pool; None for a model
            that reads none.
        last_states: see `RoundState.last_states`. With several layers the last rows are computed
            again, where the deeper ones lacked tokens.
    """

    def __init__(
        self,
        model: RoundModel,
        features: Callable[[Tensor], Tensor] | None,
        last_states: Tensor | None = None,
    ) -> None:
        self._model, self._pool = model, model.pool
        self._features, self._last_states = features, last_states
        self._num_again = 0 if last_states is None else last_states.shape[1]

    @torch.inference_mode()
    def run(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes what is missing, in forwards of bounded size."""
        chunk = _Chunk()
        lead, num_again = self._model.token_lead, self._num_again
        for backlog in backlogs:
            # A row that reads its own token can be computed a token earlier.
            first, end = max(backlog.start - num_again, 0), backlog.end + 1 - lead
            while first < end:
                count = min(end - first, _CHUNK_ROWS - len(chunk.slots))
                tokens = backlog.token_ids[first + lead : first + lead + count]
                chunk.rows.append(SequenceRows.causal(tokens, first, backlog.head_pages))
                chunk.slots += self._slots(backlog.pages, range(first, first + count))
                first += count
                if first == end:
                    chunk.ended.append((backlog.slot, len(chunk.slots)))
                # Rows of a sequence read those before them from the cache: never in one forward.
                if len(chunk.slots) > _CHUNK_ROWS - 1 - num_again:
                    self._forward(chunk)
                    chunk = _Chunk()
                    first -= num_again * (first < end)
        if chunk.rows:
            self._forward(chunk)

    def _forward(self, chunk: _Chunk) -> None:
        device = self._pool.device
        batch = build_batch(chunk.rows, page_size=self._pool.page_size, device=device)
        features = None
        if self._features is not None:
            features = self._features(uploaded_numbers(chunk.slots, device))
        states = self._model.compute(batch, features)
        if self._last_states is None or states is None or not chunk.ended:
            return
        slots, ends = uploaded_pairs(chunk.ended, device)
        for layer, own in enumerate(states):
            # Of a text that is too short for a layer nobody reads what it left.
            rows = (ends - 1 - layer).clamp_min(0)
            self._last_states[:, layer].index_copy_(0, slots, own.index_select(0, rows))

    def _slots(self, pages: Sequence[int], positions: range) -> list[int]:
        size = self._pool.page_size
        return [pages[position // size] * size + position % size for position in positions]


@dataclass(slots=True)
class _Chunk:
    """Rows of one forward.

    Attributes:
        slots: of the target's pool, by row.
        ended: slots of sequences that are caught up with, and the number of rows up to their end.
    """

    rows: list[SequenceRows] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)


class RoundHead:
    """The draft model in rounds of several shapes with the same lanes. It is in this process, or in
    another one. Shapes go by their numbers, from 0.

    Attributes:
        state: of the lanes.
        feature_spec: the hidden states that it reads; None for none.
    """

    __slots__ = ()
    state: RoundState
    feature_spec: FeatureSpec | None

    @property
    def is_late(self) -> bool:
        """Whether trees did not come in time, so that rows are missing in the model's cache."""
        return False

    def view(self, sized: SizedShape) -> RoundState:
        """Returns the view of the state that rounds of a shape have."""
        return state_of_shape(self.state, sized)

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        """Returns what grows the trees of a shape."""
        raise NotImplementedError

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes rows before the trees of the next round grow."""

    def read_open_rows(self, number: int, num_slots: int) -> None:
        """Computes the open rows of the first slots, so that one stays open of each: the shape of
        the next rounds has fewer.

        Args:
            number: of the shape of the rounds before.
        """

    def begin(
        self, number: int, num_slots: int, sampling: RoundSampling, *, is_ahead: bool
    ) -> None:
        """A round is queued next on the current stream.

        Args:
            is_ahead: see `TreeShape`. Where nothing was prepared, trees grow behind their verdicts.
        """


class TreePlace:
    """Where the trees of rounds come from.

    Attributes:
        code: what verifies them; None takes the fastest.
    """

    __slots__ = ()
    code: Callable[..., RoundVerification] | None

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        """Returns the sizes of rounds with trees of a shape, over sequences of some length."""
        raise NotImplementedError

    def in_rounds(
        self, shapes: Sequence[SizedShape], feature_rows: Tensor | None, target: KvPool
    ) -> RoundHead:
        """Returns the model in rounds of some shapes.

        Args:
            feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's
                pool; None for a model that reads none.
            target: its pool.
        """
        raise NotImplementedError


RoundSeconds = Callable[[TreeShape, int], float | None]
"""Returns what a round with trees of a shape takes for a number of lanes; None while unknown."""


class HeadPlace(TreePlace):
    """A draft model that rounds can have: a head or a language model, in this process or in another
    one. In this one nothing is late, and it stays as it is when its draft leaves."""

    __slots__ = ()

    def warmed_up(self, round_s: RoundSeconds | None) -> None:
        """Rounds of all shapes have run.

        Args:
            round_s: what they take; None where that was not measured.
        """

    @property
    def has_caught_up(self) -> bool:
        """Whether all rounds that were announced are done, and the next one may have trees."""
        return True

    def forgive(self) -> None:
        """Sequences join rounds anew: trees that were late do not count any more."""

    def close(self) -> None:
        """Its draft has left."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnHead(HeadPlace):
    """A draft model of this process, with pages as large as the target's."""

    model: RoundModel
    code: Callable[..., RoundVerification] | None = None

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        # Nothing is prepared: target and draft take turns on one device.
        return RoundShape.of(
            tree,
            draft_vocab_size=self.model.vocab_size,
            max_context_tokens=max_context_tokens,
            block_size=self.model.block_size,
        )

    def in_rounds(
        self, shapes: Sequence[SizedShape], feature_rows: Tensor | None, target: KvPool
    ) -> RoundHead:
        assert target.page_size == self.model.pool.page_size, "pages differ in size"
        return _OwnRounds(self.model, shapes, feature_rows)


class _OwnRounds(RoundHead):
    def __init__(
        self, model: RoundModel, shapes: Sequence[SizedShape], rows: Tensor | None
    ) -> None:
        pool = model.pool
        self.feature_spec = model.feature_spec
        state = StateSizes.of(shapes, pool.page_size).empty_state(pool.device)
        self.state = replace(state, last_states=model.lane_states(state.num_slots))
        self._shapes = shapes
        self._trees = [
            _OwnTrees(model.code(batches, rows), batches, model.id_limit)
            for batches in (RoundBatches(each.shape, pool.page_size) for each in shapes)
        ]
        features = None if rows is None else rows.__getitem__
        self._catch_up = CatchUp(model, features, self.state.last_states)

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        return self._trees[number]

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        self._catch_up.run(backlogs)

    def read_open_rows(self, number: int, num_slots: int) -> None:
        sized = self._shapes[number]
        # As many as a round computes: no kernel is new.
        count, code = num_computed(num_slots, sized.max_sequences), self._trees[number].code
        seen = code.seen(state_of_shape(self.state, sized).first(count))
        code.forwards(seen, *code.open_rows(seen), keeps_states=False).read_open()
        self.state.limit_open(1)


@dataclass(frozen=True, slots=True, eq=False)
class _OwnTrees:
    """See `TreeSource`.

    Attributes:
        id_limit: ids of tokens are below it.
    """

    code: DraftCode
    batches: RoundBatches
    id_limit: int

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns a tree for each slot."""
        code = self.code
        seen = code.seen(state)
        batch, sources = code.open_rows(seen)
        tree = grown(code, seen, sampling, batch, sources)
        if seen is state:
            return tree
        # It is laid out for the draft's own count of tokens.
        trees = torch.stack((tree.rows.token_ids, tree.rows.parents), dim=1)
        return read_trees(trees, state, self.batches, self.id_limit)
