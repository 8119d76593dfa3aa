"""Drafts with a head of n next-token layers: level j of a tree is scored by layer min(j, n) - 1.

As in training, layer k reads the token k further ahead than layer 0, and the state that layer k - 1
computed for the same row. So it can compute row i only when token i + 1 + k is known. The last
n - 1 committed rows therefore stay open: every proposal computes them again, each layer the rows
whose tokens are known, and then the nodes of the tree. Beyond n levels the last layer continues its
own states.

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
from services.draft.drafters.pass_trees import grown_shape
from services.draft.events import MappedHeadLimits
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.upload import uploaded_numbers
from shared.runtime.tree_model import LayeredModel, RoundModel
from shared.speculation.tree import Beam, BeamRows, TreeGrowth, choose_children, parent_states
from shared.tokens import TreeShape


class LayerRows:
    """Lays out the open committed rows of one sequence and its growing tree for every layer.

    *Row i* of layer k reads the token at i + 1 + k and the state of row i in layer k - 1. So each
    layer has one committed row fewer than the layer before it. The rows of the tree follow them. A
    node's row reads its parent's state in the layer before; the root is the last committed row.

    Attributes:
        paths: tree tokens on the path to each node of the last beam, the node's own included.
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
        """Returns the number of open committed rows of a layer."""
        return len(self._tokens) - layer

    def add_beam(self, beam: BeamRows) -> None:
        """Appends the next beam to the tree."""
        token_ids, parents = beam.token_ids, beam.parents
        first, depth = len(self._tree_tokens), len(self.paths[0]) + 1
        self._parents += [self._beam_rows[parent] for parent in parents]
        self._tree_tokens += token_ids
        self._depths += [depth] * len(token_ids)
        self._visible += beam.visible
        self._beam_rows = list(range(first, first + len(token_ids)))
        self.paths = [
            (*self.paths[parent], token) for parent, token in zip(parents, token_ids, strict=True)
        ]

    def all_rows(self, layer: int) -> SequenceRows:
        """Returns the open committed rows of a layer, then the rows of all tree nodes so far."""
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
            tail_mask=self._full_mask(base) if self._has_siblings else None,
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
        """Returns the last beam's rows alone; the layer has computed all rows before them."""
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
        """Whether the tree is no chain, so that a causal mask does not suffice."""
        return len(self.paths) > 1

    def _full_mask(self, base: int) -> list[list[bool]]:
        width = len(self._tree_tokens)
        committed = [[i <= row for i in range(base)] + [False] * width for row in range(base)]
        nodes = [
            [True] * base + [*visible, *[False] * (width - len(visible))]
            for visible in self._visible
        ]
        return committed + nodes


class MultiLayerDrafter(EagleDrafter):
    """Drafts with a head of several layers. Its leases must have no prefix cache: a cache key
    covers fewer tokens than the deeper layers read."""

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
    def _compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        states = self._contexts.hidden(counts)
        for layer in range(self._num_layers):
            rows = [self._closed_rows(sequence, count, layer) for sequence, count in counts]
            states = self._run(rows, states, layer)
        self._count_computed(counts)

    @torch.inference_mode()
    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        shape = grown_shape(shape, self._model.vocab_size)
        self._compute_beyond_window(sequences, shape)
        growth, scores = TreeGrowth(shape), DraftScores(sequences)
        layouts = [LayerRows(self._contexts.kv_of(s), s.token_ids) for s in sequences]
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        rows, hidden = [layout.all_rows(0) for layout in layouts], self._contexts.hidden(counts)
        states = self._run(rows, hidden, 0)
        roots = [[layout.num_committed(0) - 1] for layout in layouts]
        frontier = _select_states(states, rows, roots)

        def add(layer: int) -> None:
            logits = self.head.logits(frontier, layer)
            paths = [layout.paths for layout in layouts]
            growth.add(choose_children(scores(logits, paths), shape.topk))

        add(0)
        # A layer without a level to score still has committed rows to compute.
        for level in range(1, max(shape.num_steps, self._num_layers)):
            layer = min(level, self._num_layers - 1)
            beam = None if growth.is_complete else _next_beam(growth, layouts)
            if level == layer:
                hidden = _select_states(states, rows, [layout.sources(layer) for layout in layouts])
                rows = [layout.all_rows(layer) for layout in layouts]
            else:
                assert beam is not None
                hidden = parent_states(frontier, beam.parents)
                rows = [layout.beam_rows(layer) for layout in layouts]
            states = self._run(rows, hidden, layer)
            if beam is not None:
                # The last beam's rows come last.
                last_rows = [range(-len(layout.paths), 0) for layout in layouts]
                frontier = _select_states(states, rows, last_rows)
                add(layer)
        num_kept_open = self._num_layers - 1
        self._count_computed([(sequence, count - num_kept_open) for sequence, count in counts])
        return list(map(Proposal, sequences, growth.finish()))

    def _run(self, rows: Sequence[SequenceRows], hidden: Tensor, layer: int) -> Tensor:
        """Returns the states `[T, H]` of all rows."""
        pool = self._model.pool
        batch = build_batch(rows, page_size=pool.page_size, device=pool.device)
        return self.head.forward(batch, hidden, pool, layer=layer)

    def _count_computed(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Counts rows that all layers have computed, and frees their features."""
        for sequence, count in counts:
            self._contexts.kv_of(sequence).num_computed += count
            self._contexts.drop_features(sequence)

    def _compute_beyond_window(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> None:
        """Computes the backlogs that, with a tree, exceed a sliding window. The open rows and the
        tree are one block of rows, and attention assumes that a block is within the window."""
        window = self.head.layers[0].attention.shape.sliding_window
        if window is not None:
            far = [s for s in sequences if self.backlog(s) + shape.num_steps > window]
            self.catch_up(far, sum(map(self.backlog, far)))

    def _closed_rows(self, sequence: DraftSequence, count: int, layer: int) -> SequenceRows:
        """Lays out the next `count` rows, for which every layer's tokens are known."""
        kv = self._contexts.kv_of(sequence)
        start, first_token = kv.num_computed, kv.window_start + kv.num_computed + 1 + layer
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count], start, kv.lease.pages
        )


def _select_states(
    states: Tensor, rows: Sequence[SequenceRows], selected: Sequence[Sequence[int]]
) -> Tensor:
    """Returns the states of the selected rows of each sequence.

    Args:
        states: `[T, H]` that a layer computed for `rows`.
        selected: row indices within each sequence; negative ones count from its end.
    """
    index, start = list[int](), 0
    for sequence_rows, selected_rows in zip(rows, selected, strict=True):
        count = len(sequence_rows.token_ids)
        index += [start + row % count for row in selected_rows]
        start += count
    return states.index_select(0, uploaded_numbers(index, states.device))


def _next_beam(growth: TreeGrowth, layouts: Sequence[LayerRows]) -> Beam:
    """Adds the next beam to the layouts, which waits for the device: the host lays out rows."""
    beam = growth.select_beam()
    for layout, beam_rows in zip(layouts, beam.on_host(), strict=True):
        layout.add_beam(beam_rows)
    return beam
