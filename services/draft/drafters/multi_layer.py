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
from dataclasses import replace

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.contexts import SequenceKv
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.head_contexts import HeadContexts, HeadTails
from services.draft.drafters.outcome_drafter import TailWork, learn_rows
from services.draft.drafters.tails import Tail, TailNode
from services.draft.sequence import DraftSequence
from services.draft.worker import MappedHeadLimits
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.upload import uploaded_numbers
from shared.runtime.runner import HeadRunner
from shared.speculation.tree import Beam, BeamRows, Children, TreeGrowth, parent_states
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


class LayerForwards:
    """See `LayerRows` for what the rows of a layer are."""

    def __init__(self, runner: HeadRunner, contexts: HeadContexts) -> None:
        self._runner = runner
        self._contexts = contexts

    @property
    def num_layers(self) -> int:
        return len(self._runner.head.layers)

    def run(self, rows: Sequence[SequenceRows], hidden: Tensor, layer: int) -> Tensor:
        """Returns the states `[T, H]` of all rows."""
        runner = self._runner
        batch = build_batch(rows, page_size=runner.page_size, device=runner.device)
        return runner.states(batch, hidden, layer=layer)

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]` of one layer."""
        return self._runner.logits(states, layer)

    def logits_of(self, states: Tensor, layers: Tensor) -> Tensor:
        """See `HeadRunner.logits_of`."""
        return self._runner.logits_of(states, layers)

    def take_over(
        self,
        sequences: Sequence[LayerRows],
        states: Tensor,
        before: Sequence[SequenceRows],
        layer: int,
    ) -> Tensor:
        """Returns what each of the rows of `layer` reads.

        Args:
            states: `[T, H]` that the layer before left on its rows, `before`.
        """
        index, start = list[int](), 0
        for own, rows in zip(sequences, before, strict=True):
            index += [start + row for row in own.sources(layer)]
            start += len(rows.token_ids)
        return self.pick(states, index)

    def root_states(
        self,
        sequences: Sequence[LayerRows],
        states: Tensor,
        rows: Sequence[SequenceRows],
        layer: int,
    ) -> Tensor:
        """Returns the states `[S, H]` of the last committed rows, `rows` being all of the layer."""
        index, start = list[int](), 0
        for own, each in zip(sequences, rows, strict=True):
            index.append(start + own.num_committed(layer) - 1)
            start += len(each.token_ids)
        return self.pick(states, index)

    def beam_states(
        self, sequences: Sequence[LayerRows], states: Tensor, rows: Sequence[SequenceRows]
    ) -> Tensor:
        """Returns the states `[S * K, H]` of the last beam's rows, which come last."""
        index, end = list[int](), 0
        for own, each in zip(sequences, rows, strict=True):
            end += len(each.token_ids)
            index += range(end - len(own.paths), end)
        return self.pick(states, index)

    def pick(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the states of some rows, counted over all sequences."""
        return states.index_select(0, uploaded_numbers(rows, self._runner.device))

    def settle(self, sequence: DraftSequence, count: int) -> None:
        """Counts rows that all layers have computed for good."""
        self._contexts.kv_of(sequence).num_computed += count
        self._contexts.drop_features(sequence)


class LayerTails(HeadTails):
    """See `HeadTails`. A node's state is `[n, H]`, one row a layer; rows of layers that the node
    has none in are never read.

    The verified tree and the trees behind its verdicts are one deep tree to the head: a node d
    levels below the last committed token is scored by layer min(d + 1, n) as ever, with the states
    of the nodes above it in place of the features that a verdict will bring. Down to level n - 1
    that is what the layers were trained for.

    A node has a row in each layer from its own depth on, and in the last one however deep it is. It
    reads the state that its parent left in the layer before; below depth n - 1 the last layer goes
    on from its own states. Layer k has k committed rows fewer than the first, so its tail begins k
    rows earlier.

    Attributes:
        forwards: of the layers.
    """

    def __init__(
        self, contexts: HeadContexts, forwards: LayerForwards, device: torch.device
    ) -> None:
        super().__init__(contexts, device)
        self.forwards = forwards

    def plant(self, sequences: Sequence[DraftSequence], states: Tensor, children: Children) -> None:
        """Begins a tail below the last committed token of each; no node of it is computed.

        Args:
            states: `[S, n, H]` of the last committed row in each layer.
            children: the best tokens after it.
        """
        tails = []
        for sequence, state in zip(sequences, states.unbind(), strict=True):
            kv = self._contexts.kv_of(sequence)
            kv.tail = Tail(self._contexts.num_window_rows(sequence), sequence.token_ids[-1])
            kv.tail.root.state = state
            tails.append(kv.tail)
        for tail, own in zip(tails, children.on_host(), strict=True):
            tail.root.learn(own[0])

    def tail_of(self, sequence: DraftSequence) -> Tail | None:
        is_complete = self._contexts.is_complete(sequence)
        return self._contexts.kv_of(sequence).tail if is_complete else None

    def _is_root_due(self, work: TailWork) -> bool:
        return self._contexts.backlog(work.sequence) > self.forwards.num_layers - 1

    def _compute_roots(self, work: Sequence[TailWork]) -> None:
        contexts, forwards = self._contexts, self.forwards
        sequences = [each.sequence for each in work]
        own = [LayerRows(contexts.kv_of(each), each.token_ids) for each in sequences]
        counts = [(each, contexts.backlog(each)) for each in sequences]
        hidden, states = contexts.hidden(counts), list[Tensor]()
        for layer in range(forwards.num_layers):
            rows = [each.all_rows(layer) for each in own]
            after = forwards.run(rows, hidden, layer)
            states.append(forwards.root_states(own, after, rows, layer))
            if layer + 1 < forwards.num_layers:
                hidden = forwards.take_over(own, after, rows, layer + 1)
        for sequence, count in counts:
            forwards.settle(sequence, count - (forwards.num_layers - 1))
        for each in work:
            each.tail.base = contexts.num_window_rows(each.sequence)
        roots = [replace(each, nodes=[each.tail.root]) for each in work]
        self._note(roots, torch.stack(states, dim=1))

    def _compute_nodes(self, work: Sequence[TailWork]) -> None:
        nodes = [node for each in work for node in each.nodes]
        rows = [
            each.tail.lay_out(each.nodes, self._contexts.kv_of(each.sequence).lease.pages)
            for each in work
        ]
        last = self.forwards.num_layers - 1
        above = torch.stack([_state(node.parent) for node in nodes])
        states = torch.zeros_like(above)
        shallowest = min(node.depth for node in nodes)
        for layer in dict.fromkeys((*range(shallowest, last), last)):
            hidden = above[:, layer - 1]
            if layer == last:
                is_deep = uploaded_numbers([node.depth > last for node in nodes], above.device)
                hidden = torch.where(is_deep.unsqueeze(1) > 0, above[:, last], hidden)
            own = [_shifted(each, layer) for each in rows]
            states[:, layer] = self.forwards.run(own, hidden, layer)
        self._note(work, states)

    def _note(self, work: Sequence[TailWork], states: Tensor) -> None:
        """Takes the states `[L, n, H]` of the nodes, and scores what may follow each."""
        nodes = [node for each in work for node in each.nodes]
        last = self.forwards.num_layers - 1
        scoring = uploaded_numbers([min(node.depth, last) for node in nodes], states.device)
        learn_rows(work, self.forwards.logits_of(states, scoring), self._device)
        for node, state in zip(nodes, states.unbind(), strict=True):
            node.state = state


def _state(node: TailNode | None) -> Tensor:
    assert node is not None, "the root is computed with the committed rows"
    assert node.state is not None, "a node is computed after its parent"
    return node.state


def _shifted(rows: SequenceRows, layer: int) -> SequenceRows:
    """Returns the rows of a tail where a layer has them."""
    return replace(
        rows,
        positions=[position - layer for position in rows.positions],
        kv_start=rows.kv_start - layer,
        prefix_length=rows.prefix_length - layer,
        logit_rows=(),
    )


class MultiLayerDrafter(EagleDrafter):
    """See `Drafter`. Its leases must not cache prefixes: a row's key there is too short for what
    the deeper layers read."""

    _tails: LayerTails

    def _new_tails(self, contexts: HeadContexts) -> LayerTails:
        forwards = LayerForwards(self._runner, contexts)
        return LayerTails(contexts, forwards, self._runner.device)

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        return None

    @property
    def _forwards(self) -> LayerForwards:
        return self._tails.forwards

    @property
    def _num_layers(self) -> int:
        return len(self._runner.head.layers)

    @property
    def _num_open_rows(self) -> int:
        """Every layer needs a committed row."""
        return self._num_layers

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        states = self._contexts.hidden(counts)
        for layer in range(self._num_layers):
            rows = [self._settled_rows(*each, layer=layer) for each in counts]
            states = self._forwards.run(rows, states, layer)
        for sequence, count in counts:
            self._forwards.settle(sequence, count)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        self._settle_far(sequences, shape)
        forwards = self._forwards
        growth, scores = TreeGrowth(shape), DraftScores(sequences, self._runner.device)
        own = [LayerRows(self._contexts.kv_of(s), s.token_ids) for s in sequences]
        counts = [(sequence, self.backlog(sequence)) for sequence in sequences]
        rows, hidden = [each.all_rows(0) for each in own], self._contexts.hidden(counts)
        states = forwards.run(rows, hidden, 0)
        roots = [forwards.root_states(own, states, rows, 0)]
        first = self._children(
            scores, forwards.logits(roots[0], 0), [each.paths for each in own], shape
        )
        growth.add(first.best(shape.topk))
        frontier = roots[0]
        # A layer without a level to score still has committed rows to settle.
        for level in range(1, max(shape.num_steps, self._num_layers)):
            layer = min(level, self._num_layers - 1)
            beam = None if growth.is_complete else _next_beam(growth, own)
            if level == layer:
                hidden = forwards.take_over(own, states, rows, layer)
                rows = [each.all_rows(layer) for each in own]
            else:
                assert beam is not None
                hidden = parent_states(frontier, beam.parents)
                rows = [each.beam_rows(layer) for each in own]
            states = forwards.run(rows, hidden, layer)
            if level == layer:
                roots.append(forwards.root_states(own, states, rows, layer))
            if beam is not None:
                frontier = forwards.beam_states(own, states, rows)
                logits, paths = forwards.logits(frontier, layer), [each.paths for each in own]
                children = self._children(scores, logits, paths, shape)
                growth.add(children.best(shape.topk))
        for sequence, count in counts:
            forwards.settle(sequence, count - (self._num_layers - 1))
        if self._outcomes.budget:
            self._tails.plant(sequences, torch.stack(roots, dim=1), first)
        return list(map(Proposal, sequences, growth.finish()))

    def _settle_far(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> None:
        """Takes in open rows that lie behind a sliding window: those beside a tree are one block
        with it, which attention takes to be within the window."""
        window = self._runner.head.layers[0].attention.shape.sliding_window
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


def _next_beam(growth: TreeGrowth, tails: Sequence[LayerRows]) -> Beam:
    """Waits for the device once a level: the host lays out the rows."""
    beam = growth.select_beam()
    for tail, own in zip(tails, beam.on_host(), strict=True):
        tail.add_beam(own)
    return beam
