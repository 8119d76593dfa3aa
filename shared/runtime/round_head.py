"""The draft model in rounds on the device: its trees, trees that another process wrote, and the
computation of rows missing in its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers, uploaded_pairs
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.graphs import MAX_PROMPT_ROWS, MAX_PROMPT_SEQUENCES
from shared.runtime.prompt_graphs import Compute, PromptGraphs
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

# Trees that another process wrote, as the first part of a round.


def read_trees(
    trees: Tensor, state: RoundState, batches: RoundBatches, vocab_size: int
) -> RoundTree:
    """Reads the trees of all slots once, and returns them mended.

    Args:
        trees: `[at least S, 2, T]` int64, tokens and parents, see `TreeRows`.
        vocab_size: the target's vocabulary size.
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
    """Turns unchecked input into valid trees of a shape; invalid nodes are left out.

    A valid node has a token of the vocabulary and a parent before it, and is no deeper than the
    shape. Of siblings with the same token only the first counts. In a chain each row becomes the
    parent of the next, whatever was written: the target computes chains as runs of tokens.

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


@dataclass(frozen=True, slots=True)
class HeadBacklog:
    """Rows of one sequence that are missing in the head's cache.

    Attributes:
        token_ids: committed tokens; the row of position p reads the token after it.
        start: the first missing row.
        end: the row behind the last one to compute; rounds compute the open rows after it.
        pages: the target's pages, which locate the features.
        head_pages: the head's pages.
        slot: the sequence's slot.
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
    """Computes missing rows in the cache of one draft model, batched over all sequences.

    Args:
        features: returns the features `[N, W]` at slots `[N]` of the target's pool; None for a
            model that reads none.
        last_states: see `RoundState.last_states`. With several layers the last computed rows are
            computed again, because their deeper layers lacked tokens before.
    """

    def __init__(
        self,
        model: RoundModel,
        features: Callable[[Tensor], Tensor] | None,
        last_states: Tensor | None = None,
    ) -> None:
        self._model, self._pool = model, model.pool
        self._features, self._last_states = features, last_states
        self._num_recomputed = 0 if last_states is None else last_states.shape[1]
        self._compute: Compute = self._forward

    def capture(
        self, state: RoundState, memory: Any, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Captures CUDA graphs for sequences as long as those of a state; see `PromptGraphs`."""
        longest = state.page_table.shape[1] * self._pool.page_size
        graphs = PromptGraphs(self._forward, self._pool, longest, memory, stream)
        graphs.capture()
        self._compute = graphs.compute

    @torch.inference_mode()
    def run(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes the missing rows in forwards of bounded size."""
        chunk, page_size = _Chunk(), self._pool.page_size
        lead, num_recomputed = self._model.token_lead, self._num_recomputed
        for backlog in backlogs:
            # A row that reads its own token can be computed a token earlier.
            first, end = max(backlog.start - num_recomputed, 0), backlog.end + 1 - lead
            while first < end:
                count = min(end - first, MAX_PROMPT_ROWS - len(chunk.slots))
                tokens = backlog.token_ids[first + lead : first + lead + count]
                chunk.rows.append(SequenceRows.causal(tokens, first, backlog.head_pages))
                chunk.slots += [
                    backlog.pages[position // page_size] * page_size + position % page_size
                    for position in range(first, first + count)
                ]
                first += count
                if first == end:
                    chunk.ended.append((backlog.slot, len(chunk.slots)))
                # A sequence's rows read earlier ones from the cache, so never in the same forward.
                is_full = len(chunk.slots) > MAX_PROMPT_ROWS - 1 - num_recomputed
                if is_full or len(chunk.rows) == MAX_PROMPT_SEQUENCES:
                    self._run(chunk)
                    chunk = _Chunk()
                    first -= num_recomputed * (first < end)
        if chunk.rows:
            self._run(chunk)

    def _run(self, chunk: _Chunk) -> None:
        device = self._pool.device
        batch = build_batch(chunk.rows, page_size=self._pool.page_size, device=device)
        states = self._compute(batch, uploaded_numbers(chunk.slots, device))
        if self._last_states is None or states is None or not chunk.ended:
            return
        slots, ends = uploaded_pairs(chunk.ended, device)
        for layer, layer_states in enumerate(states):
            # Clamped where a text is too short for a layer; nothing reads that output.
            rows = (ends - 1 - layer).clamp_min(0)
            self._last_states[:, layer].index_copy_(0, slots, layer_states.index_select(0, rows))

    def _forward(self, batch: ForwardBatch, slots: Tensor) -> Tensor | None:
        features = None if self._features is None else self._features(slots)
        return self._model.compute(batch, features)


@dataclass(slots=True)
class _Chunk:
    """Rows of one forward.

    Attributes:
        slots: slot in the target's pool, by row.
        ended: slots of sequences whose missing rows end here, with the number of rows up to there.
    """

    rows: list[SequenceRows] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)


class RoundHead:
    """The draft model in rounds of several shapes with the same lanes, in this process or in
    another one. Shapes are numbered from 0.

    Attributes:
        state: state of the lanes.
        feature_spec: the target's hidden states that the model reads; None for none.
    """

    __slots__ = ()
    state: RoundState
    feature_spec: FeatureSpec | None

    @property
    def is_late(self) -> bool:
        """Whether trees came too late, so that rows are missing in the model's cache."""
        return False

    def view(self, sized: SizedShape) -> RoundState:
        """Returns the view of the state for rounds of one shape."""
        return state_of_shape(self.state, sized)

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        """Returns the source of the trees of one shape."""
        raise NotImplementedError

    def capture_prompts(self, memory: Any) -> None:
        """Captures the CUDA graphs with which this process computes missing rows, if it does.

        Args:
            memory: `torch.cuda.graph_pool_handle` of the rounds.
        """

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes missing rows before the trees of the next round grow."""

    def read_open_rows(self, number: int, num_slots: int) -> None:
        """Computes the open rows of the first slots, after which each has one open row: the shape
        of the next rounds has room for fewer.

        Args:
            number: number of the shape of the rounds before.
        """

    def begin(
        self, number: int, num_slots: int, sampling: RoundSampling, *, is_ahead: bool
    ) -> None:
        """Prepares for a round that the caller queues next on the current stream.

        Args:
            is_ahead: see `TreeShape`. Without prepared chains, trees grow behind their verdicts.
        """


class TreePlace:
    """A source of trees for rounds.

    Attributes:
        code: class that verifies the trees; None takes the fastest.
    """

    __slots__ = ()
    code: Callable[..., RoundVerification] | None
    announce_s: ClassVar[float] = 0.0
    """Time by which a round has to be launched earlier, so that the source hears of it in time."""

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        """Returns the sizes of rounds with trees of a shape."""
        raise NotImplementedError

    def in_rounds(
        self, shapes: Sequence[SizedShape], feature_rows: Tensor | None, target: KvPool
    ) -> RoundHead:
        """Returns the source's trees for rounds of some shapes.

        Args:
            feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's
                pool; None for a model that reads none.
            target: the target's pool.
        """
        raise NotImplementedError


RoundSeconds = Callable[[TreeShape, int], float | None]
"""Returns the seconds of a round with trees of a shape and a number of lanes; None if unknown."""


class HeadPlace(TreePlace):
    """A draft model as source of trees: a head or a language model, in this process or in another
    one. The defaults suit this process, where no tree is late and nothing is to be closed."""

    __slots__ = ()

    def warmed_up(self, round_s: RoundSeconds | None) -> None:
        """Ends the warm-up, in which rounds of all shapes have run.

        Args:
            round_s: measured round times; None if they were not measured.
        """

    @property
    def has_caught_up(self) -> bool:
        """Whether the head is done with all announced rounds, so that the next may have trees."""
        return True

    def forgive(self) -> None:
        """Forgets late trees, because sequences join rounds anew."""

    def close(self) -> None:
        """Ends the use of the model, because its draft has left."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnHead(HeadPlace):
    """A draft model of this process, with pages as large as the target's."""

    model: RoundModel
    code: Callable[..., RoundVerification] | None = None

    def shape(self, tree: TreeShape, max_context_tokens: int) -> RoundShape:
        # Without chains grown ahead: target and draft take turns on one device.
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
            for batches in (RoundBatches(sized.shape, pool.page_size) for sized in shapes)
        ]
        features = None if rows is None else rows.__getitem__
        self._catch_up = CatchUp(model, features, self.state.last_states)

    def trees(self, number: int, sized: SizedShape) -> TreeSource:
        return self._trees[number]

    def capture_prompts(self, memory: Any) -> None:
        self._catch_up.capture(self.state, memory)

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        self._catch_up.run(backlogs)

    def read_open_rows(self, number: int, num_slots: int) -> None:
        sized = self._shapes[number]
        # The same number of slots as in a round, so that no kernel is compiled anew.
        count, code = num_computed(num_slots, sized.max_sequences), self._trees[number].code
        seen = code.seen(state_of_shape(self.state, sized).first(count))
        code.forwards(seen, *code.open_rows(seen), keeps_states=False).read_open()
        self.state.limit_open(1)


@dataclass(frozen=True, slots=True, eq=False)
class _OwnTrees:
    """See `TreeSource`.

    Attributes:
        id_limit: upper bound of token ids, exclusive.
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
        # The tree is laid out for the draft's own token counts: lay it out for the target's.
        trees = torch.stack((tree.rows.token_ids, tree.rows.parents), dim=1)
        return read_trees(trees, state, self.batches, self.id_limit)
