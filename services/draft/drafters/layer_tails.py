"""Drafted subtrees of a head with n next-token layers, computed ahead of verdicts.

The verified tree and the trees behind its verdicts are one deep tree to the head: a node d levels
below the last committed token is scored by layer min(d + 1, n) as ever, with the states of the
nodes above it in place of the features that a verdict will bring. Down to level n - 1 that is what
the layers were trained for.

A node has a row in each layer from its own depth on, and in the last one however deep it is. It
reads the state that its parent left in the layer before; below depth n - 1 the last layer goes on
from its own states. Layer k has k committed rows fewer than the first, so its tail begins k rows
earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.head_kv import num_window_rows
from services.draft.drafters.head_tails import HeadTails
from services.draft.drafters.layer_forwards import LayerForwards
from services.draft.drafters.layer_rows import LayerRows
from services.draft.drafters.outcome_drafter import TailWork, learn_rows
from services.draft.drafters.tail import Tail, TailNode
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows
from shared.kv.upload import uploaded_numbers
from shared.speculation.growth import Children


class LayerTails(HeadTails):
    """See `HeadTails`. A node's state is `[n, H]`, one row a layer; rows of layers that the node
    has none in are never read.

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
            kv.tail = Tail(num_window_rows(kv, sequence), sequence.token_ids[-1])
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
            each.tail.base = num_window_rows(contexts.kv_of(each.sequence), each.sequence)
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
        chosen = states[torch.arange(len(nodes), device=states.device), scoring]
        learn_rows(work, self.forwards.logits(chosen), self._device)
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
