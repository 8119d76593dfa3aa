"""Draft trees of one shape, grown or walked level by level by a draft head, by a language model, or
by a head that scores all levels at once. The code is plain torch; fused kernels can replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.dflash import DflashHead
from shared.models.heads.head import DraftHead
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_state import LENGTH, OFFSET, RoundSampling, RoundState
from shared.speculation.tree import Beam, Children, TreeGrowth, TreeRows, choose_children, tree_rows


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Trees with their acceptance scores.

    Attributes:
        paths: `[S, T]` float32, score of the path to each row; the root's is 0.
        beams: `[2, S, L, K]` int64, the K computed nodes of each of L levels: their tokens, and the
            places of their parents in the level before.
    """

    rows: TreeRows
    paths: Tensor
    beams: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """Trees: `[S, 3 T + 2 L K]` int32, tokens, parents and the bits of the scores of T rows, then
    tokens and parents of the rows of L levels."""

    numbers: Tensor

    @classmethod
    def of(cls, part: ScoredRows) -> PackedTrees:
        rows, beams = part.rows, part.beams.flatten(2).int().unbind()
        bits = part.paths.view(torch.int32)
        columns = (rows.token_ids.int(), rows.parents.int(), bits, *beams)
        return cls(torch.cat(columns, dim=1))


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Candidates and states of N rows: the root, then L computed levels of K nodes.

    Attributes:
        numbers: `[S, 2 N W]` int32, W candidate tokens after each row, then the bits of their
            scores.
        states: `[S, N, H]`, the states that child rows read; None for a model without them.
    """

    numbers: Tensor
    states: Tensor | None

    @classmethod
    def of(cls, choices: Children, states: Tensor | None) -> PackedRows:
        """Packs the candidates after each row, `[S, N, W]`."""
        bits = choices.log_probs.contiguous().view(torch.int32)
        return cls(torch.cat((choices.token_ids.int(), bits), dim=1).flatten(1), states)


Part: TypeAlias = PackedTrees | PackedRows | None
Parts: TypeAlias = Iterator[Part]
"""A pass in parts. Each `next` queues one part on the device and yields its result: None after a
forward that others follow, then the trees, and at the end the rows, if choices are wanted. A result
holds until the next pass."""


GivenLevel: TypeAlias = tuple[ForwardBatch, Tensor]
"""Rows of a level, and for each row its source in the level before; see `Growth.beam`."""


class Scores(Protocol):
    """Finds the best tokens after the rows of S slots, level by level from the root on."""

    def add(self, logits: Tensor) -> None:
        """Adds the next level's logits `[S * N, Vd]`."""

    def choices(self) -> Children:
        """Returns the candidates after each row added so far, `[S, N, W]`; see `PackedRows`."""


class RequestScores(Protocol):
    """Scores by all sampling parameters of S requests; can be pickled for another process."""

    def confidence(self, logits: Tensor, paths: Tensor) -> Tensor:
        """Returns log probabilities of acceptance `[S, N, V]` float32.

        Args:
            logits: `[S * N, V]`, over the target's tokens.
            paths: `[S, N, D]` int64, the tree tokens on the path to each row, its own included.
        """


class Forwards:
    """The forwards of one pass. Each may read the output of the one before."""

    def first(self) -> Tensor:
        """Computes the open rows; returns the logits of each slot's last open row."""
        raise NotImplementedError

    def read_open(self) -> None:
        """Computes only the open rows. Each slot's last one will be computed again."""
        raise NotImplementedError

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        """Computes a level; returns its logits. See `Growth.beam`."""
        raise NotImplementedError

    def walk(self, levels: Iterable[GivenLevel]) -> Iterable[Tensor]:
        """Computes the open rows and given levels; returns the logits of each, those of the open
        rows first."""
        yield self.first()
        for level in levels:
            yield self.next(*level)

    def states(self) -> Tensor | None:
        """Returns the states of all rows, see `PackedRows`; None if the pass keeps none."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class TreeDraft:
    """Drafts for all slots of a state, for a target elsewhere.

    Attributes:
        num_choices: W, tokens to find after the root and each computed node, at least as many as
            children. To find them, the best leaves are computed after the trees. 0 for none.
        scores: scores of requests that no kind of `RoundSampling` covers; `code` is plain then.
    """

    code: DraftCode
    num_choices: int = 0
    scores: RequestScores | None = None

    def grow_levels(self, state: RoundState, sampling: RoundSampling, sources: Tensor) -> Parts:
        """Grows trees behind the open rows.

        Args:
            state: the slots; `page_table` is not read.
            sources: `[S * W]` int64, see `DraftCode.forwards`.
        """
        forwards = self._forwards(state, sources)
        if self.scores is None:
            growth = self.code.growth(state, sampling, self.num_choices)
        else:
            batches = self.code.batches
            scores = PlainScores(state, batches, self.scores, self.num_choices)
            growth = Growth(state, batches, scores)
        yield from grow(growth, forwards, self.code.batches.shape.tree.num_steps)
        leaves = growth.beam() if self.num_choices else None
        yield PackedTrees.of(growth.scored())
        if leaves is not None:
            growth.scores.add(forwards.next(*leaves))
            yield PackedRows.of(growth.scores.choices(), forwards.states())

    def walk(
        self, state: RoundState, sampling: RoundSampling, sources: Tensor, walks: Tensor
    ) -> PackedRows:
        """Computes given trees behind the open rows; see `grow_levels`.

        Args:
            walks: `[S, L * K, 2 + L]` int64, see `RoundBatches.of_walks`.
        """
        forwards = self._forwards(state, sources)
        scores = self.code.scores(state, sampling, self.num_choices)
        for logits in forwards.walk(self.code.batches.of_walks(state, walks)):
            scores.add(logits)
        return PackedRows.of(scores.choices(), forwards.states())

    def _forwards(self, state: RoundState, sources: Tensor) -> Forwards:
        batch, _ = self.code.open_rows(state)
        return self.code.forwards(state, batch, sources, keeps_states=bool(self.num_choices))


def grow(growth: Growth, forwards: Forwards, num_steps: int) -> Iterator[None]:
    """Computes the forwards of a growth of `num_steps` levels; yields between two forwards."""
    growth.add(forwards.first())
    for _ in range(num_steps - 1):
        yield None
        growth.add(forwards.next(*growth.beam()))


def grown(
    code: DraftCode,
    state: RoundState,
    sampling: RoundSampling,
    batch: ForwardBatch,
    sources: Tensor,
) -> RoundTree:
    """Grows a tree behind the open rows of each slot and returns the trees.

    Args:
        batch: the open rows.
        sources: see `DraftCode.forwards`.
    """
    growth = code.growth(state, sampling, 0)
    forwards = code.forwards(state, batch, sources, keeps_states=False)
    for _ in grow(growth, forwards, code.batches.shape.tree.num_steps):
        pass
    return growth.finish()


# Growth of trees in the slots of a state, in plain torch.


class PlainScores:
    """See `Scores`.

    Args:
        num_choices: tokens to find after each row; 0 finds the `topk` children that trees need.
    """

    def __init__(
        self,
        state: RoundState,
        batches: RoundBatches,
        sampling: RoundSampling | RequestScores,
        num_choices: int,
    ) -> None:
        self._state, self._sampling = state, sampling
        self._width = num_choices or batches.shape.tree.topk
        self._levels: list[Children] = []

    def best(self, logits: Tensor, paths: Tensor | None = None) -> Children:
        """Returns the best tokens after each row of the next level; `paths` see `RequestScores`."""
        if isinstance(self._sampling, RoundSampling):
            scores = self._sampling.confidence(logits, self._state, len(self._levels))
            scores = scores.view(self._state.num_slots, -1, logits.shape[1])
        else:
            assert paths is not None, "request scores need the paths of growing trees"
            scores = self._sampling.confidence(logits, paths)
        self._levels.append(choose_children(scores, self._width))
        return self._levels[-1]

    def add(self, logits: Tensor) -> None:
        self.best(logits)

    def choices(self) -> Children:
        return Children(
            torch.cat([level.token_ids for level in self._levels], dim=1),
            torch.cat([level.log_probs for level in self._levels], dim=1),
        )


class Growth:
    """`TreeGrowth` of S slots, in plain torch: `add` a level's logits, compute the rows of `beam`.

    Attributes:
        scores: scores of the levels added so far.
    """

    scores: Scores

    def __init__(self, state: RoundState, batches: RoundBatches, scores: PlainScores) -> None:
        self._state, self._batches = state, batches
        self.scores, self._best = scores, scores.best
        self._growth, self._beams = TreeGrowth(batches.shape.tree), list[Beam]()
        self._paths = state.numbers.new_empty((state.num_slots, 1, 0))

    def add(self, logits: Tensor) -> None:
        """Adds the children of the root, later of the last beam, from logits `[S * N, Vd]`."""
        children = self._best(logits, self._paths)
        self._growth.add(children.best(self._batches.shape.tree.topk))

    def beam(self) -> tuple[ForwardBatch, Tensor]:
        """Returns the rows of the last level's beam, and for each row the index `[S * K]` int64 of
        the row in the level before whose state it reads."""
        beam, level = self._growth.select_beam(), len(self._beams)
        self._beams.append(beam)
        above = self._paths.gather(1, beam.parents.unsqueeze(2).expand(-1, -1, level))
        self._paths = torch.cat((above, beam.token_ids.unsqueeze(2)), dim=2)
        num_before = self._batches.shape.tree.topk if level else 1
        first_rows = torch.arange(self._state.num_slots, device=beam.parents.device) * num_before
        parents = first_rows.unsqueeze(1) + beam.parents
        return self._batches.of_beam(self._state, beam, level), parents.flatten()

    def scored(self) -> ScoredRows:
        """Returns the trees with their best nodes."""
        tree, roots = self._batches.shape.tree, self._state.roots
        nodes = self._growth.select()
        # Without a computed level, `cat` needs an empty one for its shape.
        none = roots.new_empty((2, self._state.num_slots, 0, tree.topk))
        levels = [torch.stack((beam.token_ids, beam.parents)).unsqueeze(2) for beam in self._beams]
        return ScoredRows(
            tree_rows(nodes, roots, tree.num_steps),
            torch.cat((torch.zeros_like(nodes.path[:, :1]), nodes.path), dim=1),
            torch.cat((none, *levels), dim=2),
        )

    def finish(self) -> RoundTree:
        """Returns the trees laid out as the target's rows."""
        return self._batches.of_trees(self._state, self.scored().rows)


class DraftCode:
    """A model and the code that drafts with it. The methods implemented here are plain torch; fused
    subclasses replace them."""

    __slots__ = ()
    batches: RoundBatches

    def seen(self, state: RoundState) -> RoundState:
        """Returns a lane state with the token counts that this model's rows need."""
        return state

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """See `RoundBatches.of_open_rows`."""
        return self.batches.of_open_rows(state)

    def forwards(
        self, state: RoundState, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> Forwards:
        """Returns the forwards of one pass.

        Args:
            batch: the open rows of `state`.
            sources: for each open row, the index of its features or states in the source rows.
        """
        raise NotImplementedError

    def scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Scores:
        """Returns scores that find `num_choices` tokens after each row, see `PlainScores`."""
        return PlainScores(state, self.batches, sampling, num_choices)

    def growth(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Growth:
        """Returns a growth without levels; `num_choices` see `scores`."""
        scores = PlainScores(state, self.batches, sampling, num_choices)
        return Growth(state, self.batches, scores)

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """Returns the simplest kind with which this code drafts as it does for `sampling`."""
        return sampling


# A language model that drafts trees in one pass.


class DecoderForwards(Forwards):
    """Forwards of a language model, whose rows read only tokens."""

    def __init__(self, logits: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> None:
        self._logits, self._batch = logits, batch

    def first(self) -> Tensor:
        return self._logits(self._batch)

    def read_open(self) -> None:
        self.first()

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        return self._logits(batch)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderDraft(DraftCode):
    """A language model. Its row i reads token i, a head's row i the token after it. So `seen` adds
    one to the length, and takes one from the offset to keep the drawn positions."""

    decoder: Decoder
    pool: KvPool
    batches: RoundBatches

    def seen(self, state: RoundState) -> RoundState:
        numbers = state.numbers.clone()
        numbers[:, LENGTH] += 1
        numbers[:, OFFSET] -= 1
        return replace(state, numbers=numbers)

    def forwards(
        self, state: RoundState, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> DecoderForwards:
        return DecoderForwards(self.logits, batch)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Computes rows; returns the logits of the batch's logit rows."""
        hidden = self.decoder.forward(batch, self.pool).hidden
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows))


# A head that drafts a whole block in one forward, from the target's features: DFlash.


class BlockForwards(Forwards):
    """Forwards of a block head. `first` computes the block, whose rows score the levels in turn.
    All nodes of a level share the scores of its position.

    Args:
        read: computes the open rows.
        score: computes the block behind the open rows; returns the logits `[L, S, V]` of L levels.
    """

    def __init__(self, read: Callable[[], None], score: Callable[[], Tensor]) -> None:
        self._read, self._score = read, score
        self._levels: Iterator[Tensor] = iter(())

    def read_open(self) -> None:
        self._read()

    def first(self) -> Tensor:
        self._read()
        self._levels = iter(self._score())
        return next(self._levels)

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        # Only the size of the level matters.
        logits = next(self._levels)
        num_nodes = len(parents) // len(logits)
        return logits if num_nodes == 1 else logits.repeat_interleave(num_nodes, dim=0)


@dataclass(frozen=True, slots=True, eq=False)
class BlockDraft(DraftCode):
    """A head that drafts blocks.

    An open row turns the features of its position into keys and values. Its token is the next one,
    so the token of the last open row opens the block.

    Attributes:
        source_rows: `[num_slots, W]`, the target's features for each slot of the target's pool.
    """

    head: DflashHead
    pool: KvPool
    batches: RoundBatches
    source_rows: Tensor

    def forwards(
        self, state: RoundState, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> BlockForwards:
        read = partial(self._write_context, batch, sources)
        return BlockForwards(read, partial(self._score_block, batch))

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits `[R, V]` of states `[R, H]`."""
        return self.head.logits(states)

    def _write_context(self, batch: ForwardBatch, sources: Tensor) -> None:
        features = self.source_rows.index_select(0, sources)
        self.head.write_context(features, batch.positions, batch.slots, self.pool)

    def _score_block(self, batch: ForwardBatch) -> Tensor:
        last = batch.logit_rows
        block = self.batches.of_blocks(
            batch.token_ids[last],
            batch.positions[last] + 1,
            batch.page_table,
            self.head.config.mask_token_id,
        )
        read = self.head.forward(block, self.pool).index_select(0, block.logit_rows)
        logits = self.logits(read)
        return logits.view(-1, len(last), logits.shape[1])


# First part of a speculative round: the head computes the committed tokens and grows the trees.

Level = Callable[[ForwardBatch, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
Logits = Callable[[Tensor], Tensor]


class HeadForwards(Forwards):
    """Forwards of a head: each level reads the states of the level before.

    Args:
        level, logits: see `RoundDraft`.
        hidden: `[any, H]`, input states of the open rows.
        sources: `[R]` int64, the row of `hidden` that each open row reads; None: in order.
        keeps_states: whether to keep the states of all levels, instead of the last one's alone.
    """

    def __init__(
        self,
        level: Level,
        logits: Logits,
        batch: ForwardBatch,
        hidden: Tensor,
        sources: Tensor | None,
        *,
        keeps_states: bool,
    ) -> None:
        self._level, self._logits = level, logits
        self._batch, self._hidden, self._sources = batch, hidden, sources
        self._keeps_states, self._kept_states = keeps_states, list[Tensor]()
        self._num_slots = len(batch.logit_rows)

    def first(self) -> Tensor:
        return self._logits(self._open())

    def read_open(self) -> None:
        self._open()

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        return self._logits(self._advance(batch, parents, None))

    def walk(self, levels: Iterable[GivenLevel]) -> Sequence[Tensor]:
        # One product for all levels reads the vocabulary matrix, the largest of all, only once.
        read = [self._open(), *(self._advance(*level, None) for level in levels)]
        return torch.split(self._logits(torch.cat(read)), [len(rows) for rows in read])

    def states(self) -> Tensor:
        levels = [own.view(self._num_slots, -1, own.shape[1]) for own in self._kept_states]
        return torch.cat(levels, dim=1)

    def _open(self) -> Tensor:
        return self._advance(self._batch, self._sources, self._batch.logit_rows)

    def _advance(
        self, batch: ForwardBatch, sources: Tensor | None, wanted: Tensor | None
    ) -> Tensor:
        """Computes a level; returns the input of its logits."""
        self._hidden, read = self._level(batch, self._hidden, sources, wanted)
        if self._keeps_states:
            self._kept_states.append(self._hidden)
        return read


@dataclass(frozen=True, slots=True, eq=False)
class RoundDraft(DraftCode):
    """A head of one layer.

    Attributes:
        pool: the head's pool; its pages are as large as the target's.
        source_rows: input of open rows beside tokens: the target's features `[num_slots, W]` for
            each slot of the target's pool, or for any rows where the target is elsewhere.
        reads_states: whether `source_rows` are states `[any, H]` of the head itself instead.
    """

    head: DraftHead
    pool: KvPool
    batches: RoundBatches
    source_rows: Tensor
    reads_states: bool = False

    def forwards(
        self, state: RoundState, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> HeadForwards:
        hidden, read = self.source_rows, None
        if hidden.is_contiguous() and (self.reads_states or self.head.reads_rows(hidden)):
            read = sources
        else:
            rows = hidden.index_select(0, sources)
            hidden = rows if self.reads_states else self.head.fuse(rows)
        return HeadForwards(self.level, self.logits, batch, hidden, read, keeps_states=keeps_states)

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns states `[R, H]` of the wanted rows, and the input of their logits.

        Args:
            sources: the row of `hidden` that each row reads; None takes them in order.
            wanted: rows to return; None returns all.
        """
        read = hidden if sources is None else hidden.index_select(0, sources)
        states = self.head.forward(batch, read, self.pool)
        states = states if wanted is None else states.index_select(0, wanted)
        return states, states

    def logits(self, read: Tensor) -> Tensor:
        """Returns logits `[R, any]` from the second result of `level`."""
        return self.head.logits(read)


# A head of several next-token layers, which drafts chains with one layer for each level.


class LayeredForwards(Forwards):
    """Forwards of chains.

    Layer k computes row i when token i + 1 + k is known, from the output of layer k - 1 on row i.
    So layer k reads the open tokens k rows earlier than layer 0, behind the row whose states are in
    `RoundState.last_states`. Layer min(j, n - 1) scores the node of level j; it has to read the
    nodes above first.

    Args:
        state: the slots; `last_states` is written.
        hidden: `[S * W, H]`, input states of the open rows.
    """

    def __init__(
        self, draft: LayeredDraft, state: RoundState, batch: ForwardBatch, hidden: Tensor
    ) -> None:
        assert state.last_states is not None, "a layer reads the states of the layer before"
        self._draft, self._batch, self._hidden = draft, batch, hidden
        self._last_states, self._num_open = state.last_states, state.num_open
        self._page_table, self._roots = state.head_page_table, state.lengths - 1
        self._num_slots = len(batch.logit_rows)
        # Output of each layer on the last open row; output of the last level on its nodes.
        self._ends: list[Tensor] = []
        self._nodes: Tensor | None = None
        self._tokens: list[Tensor] = []

    def first(self) -> Tensor:
        self._read(num_kept=0)
        return self._draft.logits(self._ends[0], 0)

    def read_open(self) -> None:
        self._read(num_kept=1)

    def _read(self, *, num_kept: int) -> None:
        """Computes the open rows in all layers.

        Args:
            num_kept: rows at the end that stay open.
        """
        draft, hidden = self._draft, self._hidden
        index = (self._num_open - num_kept).view(-1, 1, 1).expand(-1, 1, hidden.shape[1])
        last = list[Tensor]()
        for layer in range(draft.num_layers):
            batch = draft.batches.earlier(self._batch, self._page_table, layer)
            states = draft.states(batch, hidden, layer)
            self._ends.append(states.index_select(0, self._batch.logit_rows))
            if layer == draft.num_layers - 1:
                break
            before = self._last_states[:, layer : layer + 1]
            open_states = states.view(self._num_slots, -1, hidden.shape[1])
            rows = torch.cat((before, open_states), dim=1)
            hidden = rows[:, :-1].flatten(0, 1)
            last.append(rows.gather(1, index))
        self._last_states.copy_(torch.cat(last, dim=1))

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        # Only the tokens of the level matter.
        assert len(batch.token_ids) == self._num_slots, "layers draft chains"
        self._tokens.append(batch.token_ids)
        level, num_layers = len(self._tokens), self._draft.num_layers
        layer = min(level, num_layers - 1)
        if level == layer:
            above = [self._ends[layer - 1].unsqueeze(1)]
            if self._nodes is not None:
                above.append(self._nodes)
            tokens, hidden = torch.stack(self._tokens, dim=1), torch.cat(above, dim=1)
        else:
            assert self._nodes is not None
            tokens, hidden = self._tokens[-1].unsqueeze(1), self._nodes[:, -1:]
        num_rows = tokens.shape[1]
        # The root is row `roots`, which layer 0 computes when the token after it is known.
        starts = self._roots - layer + level - num_rows
        rows = self._draft.batches.of_runs(tokens, starts, self._page_table)
        states = self._draft.states(rows, hidden.flatten(0, 1), layer)
        self._nodes = states.view(self._num_slots, num_rows, -1)
        return self._draft.logits(self._nodes[:, -1], layer)


@dataclass(frozen=True, slots=True, eq=False)
class LayeredDraft(DraftCode):
    """A head of several layers, which drafts chains.

    Attributes:
        source_rows: see `RoundDraft`.
    """

    head: DraftHead
    pool: KvPool
    batches: RoundBatches
    source_rows: Tensor

    @property
    def num_layers(self) -> int:
        """n, the layers of the head."""
        return len(self.head.layers)

    def forwards(
        self, state: RoundState, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool
    ) -> LayeredForwards:
        hidden = self.head.fuse(self.source_rows.index_select(0, sources))
        return LayeredForwards(self, state, batch, hidden)

    def states(self, batch: ForwardBatch, hidden: Tensor, layer: int) -> Tensor:
        """Returns the output of a layer on rows, `[R, H]`."""
        return self.head.forward(batch, hidden, self.pool, layer=layer)

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """Returns logits `[R, any]` of a layer's states `[R, H]`."""
        return self.head.logits(states, layer)
