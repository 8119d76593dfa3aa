"""Drafts with a head of n next-token layers: level j of a tree is scored by layer min(j, n) - 1.

Layer k reads the token k further ahead than layer 0 and the state that layer k - 1 left on the
same row, as in training, so it can compute row i only when token i + 1 + k is known. The last
n - 1 committed rows therefore stay open: every proposal computes them again, in each layer those
whose tokens are known, and then the nodes of the tree on top. Beyond n levels the last layer
continues its own states.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.contexts import SequenceKv
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.events import MappedHeadLimits
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.upload import uploaded_numbers
from shared.runtime.tree_model import LayeredModel, RoundModel
from shared.speculation.tree import Beam, BeamRows, TreeGrowth, choose_children, parent_states
from shared.tokens import TreeShape


class LayerRows:
    """Lays out the committed rows of one sequence that are still open, and a growing tree, for
    every layer.

    *Row i* of layer k reads the token at i + 1 + k and the state of row i of layer k - 1, so each
    layer has one committed row fewer than the one before it, and the rows of a tree follow them. A
    node's row reads the state that its parent left in the layer before; the root's is the last
    committed row.

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


class MultiLayerDrafter(EagleDrafter):
    """See `Drafter`. Its leases must not cache prefixes: a row's key there is too short for what
    the deeper layers read."""

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        return None

    @property
    def _round_model(self) -> RoundModel:
        return LayeredModel(self.head, self._model.pool)

    @property
    def _num_layers(self) -> int:
        return len(self.head.layers)

    @property
    def _num_open_rows(self) -> int:
        """Every layer needs a committed row."""
        return self._num_layers

    @torch.inference_mode()
    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        states = self._contexts.hidden(counts)
        for layer in range(self._num_layers):
            rows = [self._settled_rows(*each, layer=layer) for each in counts]
            states = self._run(rows, states, layer)
        self._settle(counts)

    @torch.inference_mode()
    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        shape = self._grown_shape(shape)
        self._settle_far(sequences, shape)
        growth, scores = TreeGrowth(shape), DraftScores(sequences)
        own = [LayerRows(self._contexts.kv_of(s), s.token_ids) for s in sequences]
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        rows, hidden = [each.all_rows(0) for each in own], self._contexts.hidden(counts)
        states = self._run(rows, hidden, 0)
        frontier = _picked(states, rows, [[each.num_committed(0) - 1] for each in own])

        def add(layer: int) -> None:
            logits = self.head.logits(frontier, layer)
            growth.add(choose_children(scores(logits, [each.paths for each in own]), shape.topk))

        add(0)
        # A layer without a level to score still has committed rows to settle.
        for level in range(1, max(shape.num_steps, self._num_layers)):
            layer = min(level, self._num_layers - 1)
            beam = None if growth.is_complete else _next_beam(growth, own)
            if level == layer:
                hidden = _picked(states, rows, [each.sources(layer) for each in own])
                rows = [each.all_rows(layer) for each in own]
            else:
                assert beam is not None
                hidden = parent_states(frontier, beam.parents)
                rows = [each.beam_rows(layer) for each in own]
            states = self._run(rows, hidden, layer)
            if beam is not None:
                # The last beam's rows come last.
                frontier = _picked(states, rows, [range(-len(each.paths), 0) for each in own])
                add(layer)
        self._settle([(each, count - (self._num_layers - 1)) for each, count in counts])
        return list(map(Proposal, sequences, growth.finish()))

    def _run(self, rows: Sequence[SequenceRows], hidden: Tensor, layer: int) -> Tensor:
        """Returns the states `[T, H]` of all rows."""
        pool = self._model.pool
        batch = build_batch(rows, page_size=pool.page_size, device=pool.device)
        return self.head.forward(batch, hidden, pool, layer=layer)

    def _settle(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Counts rows that all layers have computed for good."""
        for sequence, count in counts:
            self._contexts.kv_of(sequence).num_computed += count
            self._contexts.drop_features(sequence)

    def _settle_far(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> None:
        """Takes in open rows that lie behind a sliding window: those beside a tree are one block
        with it, which attention takes to be within the window."""
        window = self.head.layers[0].attention.shape.sliding_window
        if window is not None:
            far = [s for s in sequences if self.backlog(s) + shape.num_steps > window]
            self.catch_up(far, sum(map(self.backlog, far)))

    def _settled_rows(self, sequence: DraftSequence, count: int, *, layer: int) -> SequenceRows:
        """Lays out the next `count` rows, whose tokens every layer knows."""
        kv = self._contexts.kv_of(sequence)
        start, first_token = kv.num_computed, kv.window_start + kv.num_computed + 1 + layer
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count], start, kv.lease.pages
        )


def _picked(
    states: Tensor, rows: Sequence[SequenceRows], wanted: Sequence[Sequence[int]]
) -> Tensor:
    """Returns the states of some rows of each sequence.

    Args:
        states: `[T, H]` that a layer left on `rows`.
        wanted: by sequence; negative ones count from its end.
    """
    index, start = list[int](), 0
    for each, own in zip(rows, wanted, strict=True):
        count = len(each.token_ids)
        index += [start + row % count for row in own]
        start += count
    return states.index_select(0, uploaded_numbers(index, states.device))


def _next_beam(growth: TreeGrowth, tails: Sequence[LayerRows]) -> Beam:
    """Waits for the device once a level: the host lays out the rows."""
    beam = growth.select_beam()
    for tail, own in zip(tails, beam.on_host(), strict=True):
        tail.add_beam(own)
    return beam
