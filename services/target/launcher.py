"""Queues the work of a step on the device. Only the `read` methods wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from services.target.drafts.feature_store import FeatureFeed
from services.target.scheduler import ScheduledSequence, StepPlan
from services.target.sequence import Sequence
from services.target.verifier import Decision, Draw, QueuedLogprobs, Verifier
from shared.generation import PromptScored
from shared.kv.batch import DecodeBatches, ForwardBatch, SequenceRows, build_batch
from shared.kv.upload import Array, uploaded_numbers, uploaded_pairs
from shared.runtime.host_copy import DeviceMark
from shared.runtime.runner import ModelRunner

UNREAD = 0
"""Placeholder for a token that is filled in on the device."""


def sequence_rows(entry: ScheduledSequence) -> SequenceRows:
    """Returns the rows of one scheduled sequence: its tokens, then its tree nodes.

    Logits are wanted of the rows that score prompt tokens. If the step computes the sequence's last
    token, they are also wanted of that token's row and of every node. A pending token is `UNREAD`:
    its value is on the device.
    """
    sequence, tree, start = entry.sequence, entry.tree, entry.start
    committed = sequence.token_ids[start : start + entry.num_rows]
    assert not (sequence.num_pending and len(tree)), "a tree cannot hang off an unread token"
    last_position = start + entry.num_rows - 1
    num_all = entry.num_rows + len(tree)
    drawing = range(entry.num_rows - 1, num_all) if entry.is_complete else ()
    return SequenceRows(
        token_ids=[*committed, *[UNREAD] * (entry.num_rows - len(committed)), *tree.token_ids],
        positions=[
            *range(start, start + entry.num_rows),
            *(last_position + depth for depth in tree.depths),
        ],
        kv_start=start,
        pages=sequence.open_lease.pages,
        prefix_length=start,
        tail_mask=_tail_mask(entry) if len(tree) else None,
        logit_rows=[*entry.scored, *drawing],
    )


def _tail_mask(entry: ScheduledSequence) -> Array:
    """Returns the attention mask of the rows: committed rows are causal; a node sees every
    committed row, its ancestors and itself."""
    num_rows, tree = entry.num_rows, entry.tree
    mask = np.tri(num_rows + len(tree), dtype=np.bool_)
    mask[num_rows:, num_rows:] = False
    for node, parent in enumerate(tree.parent_indices, num_rows):
        if parent is not None:
            mask[node] = mask[num_rows + parent]
        mask[node, node] = True
    return mask


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of prompt tokens that one step scores.

    Attributes:
        spans: each sequence that is scored, and the positions of its scored tokens.
    """

    queued: QueuedLogprobs
    spans: tuple[tuple[Sequence, range], ...]

    def read(self) -> list[tuple[Sequence, PromptScored]]:
        """Waits for the device and returns one event for each sequence."""
        logprobs = iter(self.queued.read())
        return [
            (sequence, PromptScored(span.start, tuple(next(logprobs) for _ in span)))
            for sequence, span in self.spans
        ]


def _scored(
    scheduled: SequenceOf[ScheduledSequence], logits: Tensor
) -> tuple[PromptScores, Tensor]:
    """Queues the scores of prompt tokens and counts the tokens as scored.

    Args:
        logits: `[L, V]`; for each sequence its scoring rows, then its drawing rows.

    Returns:
        The scores, and the indices `[D]` int64 of the drawing rows.
    """
    scoring: list[int] = []
    drawing: list[int] = []
    token_ids: list[int] = []
    spans: list[tuple[Sequence, range]] = []
    requested: list[tuple[int, SequenceOf[int]]] = []
    row = 0
    for entry in scheduled:
        if entry.scored:
            sequence, first = entry.sequence, entry.start + 1  # a row scores the token after it
            span = range(first + entry.scored.start, first + entry.scored.stop)
            request = sequence.request
            assert request.prompt_scoring is not None
            spans.append((sequence, span))
            requested += [(request.prompt_scoring.num_top, request.logprob_token_ids)] * len(span)
            token_ids += sequence.token_ids[span.start : span.stop]
            scoring += range(row, row + len(span))
            sequence.next_scored = span.stop
        row += len(entry.scored)
        num_drawing = 1 + len(entry.tree) if entry.is_complete else 0
        drawing += range(row, row + num_drawing)
        row += num_drawing
    index = uploaded_numbers([scoring, token_ids], logits.device)
    num_top, named = zip(*requested, strict=True)
    queued = QueuedLogprobs.of(logits.index_select(0, index[0]), index[1], num_top, named)
    return PromptScores(queued, tuple(spans)), uploaded_numbers(drawing, logits.device)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """One step between its launch and the commit of its tokens.

    Attributes:
        draw: of `plan.drawn`, in that order; None when no sequence draws.
        scores: log probabilities of prompt tokens; None when no sequence wants any.
        num_rows: rows of the forward.
        num_prompt_rows: rows of the sequences that computed more than one token.
        mark: passed once the device has done the step's work.
        start_s: when the step was planned.
        allows_run_ahead: whether the next step can be launched before this one's tokens are read.
        host_gap_s: how long the device was idle before the step, because of the host.
        retired: sequences that ended while the step was in flight. Their rows are discarded; they
            keep their pages until the step is read.
    """

    plan: StepPlan
    draw: Draw | None
    scores: PromptScores | None
    num_rows: int
    num_prompt_rows: int
    mark: DeviceMark
    start_s: float
    allows_run_ahead: bool
    host_gap_s: float = 0.0
    retired: list[Sequence] = field(default_factory=list)

    def computes(self, sequence: Sequence) -> bool:
        """Whether rows of `sequence` are in flight."""
        return any(entry.sequence is sequence for entry in self.plan.scheduled)

    def read(self) -> list[tuple[ScheduledSequence, Decision]]:
        """Waits for the device; returns the decision about every sequence that drew."""
        decisions = [] if self.draw is None else self.draw.read()
        for entry in self.plan.drawn:
            entry.sequence.num_pending -= 1
        return list(zip(self.plan.drawn, decisions, strict=True))


class Launcher:
    """Launches planned steps on the device. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, verifier: Verifier, features: FeatureFeed) -> None:
        self._runner = runner
        self._verifier = verifier
        self._features = features
        self._decode_batches = DecodeBatches(runner.page_size, runner.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, last: LaunchedStep | None, *, start_s: float) -> LaunchedStep:
        """Queues the forward and the draw, and counts the rows as computed.

        Args:
            last: the step in flight, whose drawn tokens this step reads on the device.
        """
        batch = self._packed(plan.scheduled)
        if last is not None and last.draw is not None:
            batch = _with_drawn_tokens(batch, plan, last)
        output = self._runner.run(batch, capture_layers=self._features.captured_layers)
        self._features.store(plan, batch.slots, output)
        draw, scores = None, None
        logits, positions, input_ids = output.logits, batch.positions, batch.token_ids
        if len(batch.logit_rows) < len(positions):  # else all rows, in order: the indices ascend
            positions = positions.index_select(0, batch.logit_rows)
            input_ids = input_ids.index_select(0, batch.logit_rows)
        if any(entry.scored for entry in plan.scheduled):
            scores, drawing = _scored(plan.scheduled, logits)
            logits = logits.index_select(0, drawing)
            positions, input_ids = positions[drawing], input_ids[drawing]
        if plan.drawn:
            draw = self._verifier.draw(plan.drawn, logits, positions=positions, input_ids=input_ids)
        for entry in plan.scheduled:
            entry.sequence.num_computed += entry.num_rows
            entry.sequence.num_pending += entry.is_complete
        mark = DeviceMark(self._runner.device)
        mark.put()
        return LaunchedStep(
            plan,
            draw,
            scores,
            len(batch.token_ids),
            sum(entry.num_rows for entry in plan.scheduled if entry.num_rows > 1),
            mark,
            start_s,
            _allows_run_ahead(plan.drawn, draw),
        )

    def _packed(self, scheduled: SequenceOf[ScheduledSequence]) -> ForwardBatch:
        if all(
            entry.num_rows == 1 and entry.is_complete and not entry.node_indices
            for entry in scheduled
        ):
            # Plain decode: every sequence has one row, which draws.
            sequences = [entry.sequence for entry in scheduled]
            return self._decode_batches.build(
                [UNREAD if seq.num_pending else seq.token_ids[-1] for seq in sequences],
                [entry.start for entry in scheduled],
                [sequence.open_lease for sequence in sequences],
            )
        rows = [sequence_rows(entry) for entry in scheduled]
        return build_batch(rows, page_size=self._runner.page_size, device=self._runner.device)

    def keep_accepted(self, decided: SequenceOf[tuple[ScheduledSequence, Decision]]) -> None:
        """Moves the KV and the features of accepted nodes, which were computed in tree order, into
        path order behind the committed tokens."""
        moves: list[tuple[int, int]] = []
        for entry, decision in decided:
            if decision.accepted_nodes:
                slots = entry.slots(self._runner.page_size)[entry.num_rows :]
                path = enumerate(decision.accepted_nodes)
                moves += [(slots[node], slots[index]) for index, node in path if node != index]
        if moves:
            self._features.move(*self._runner.move(moves))


def _allows_run_ahead(drawn: SequenceOf[ScheduledSequence], draw: Draw | None) -> bool:
    if draw is None:
        return True
    if draw.token_ids is None or any(entry.node_indices for entry in drawn):
        return False  # the host decides how much of a tree is accepted
    # Only the host can compute the next mask or tree from the drawn tokens.
    return not any(
        entry.sequence.is_masked or entry.sequence.prediction is not None for entry in drawn
    )


def _with_drawn_tokens(batch: ForwardBatch, plan: StepPlan, last: LaunchedStep) -> ForwardBatch:
    """Fills in the tokens that `last` draws; the host has not read them."""
    assert last.draw is not None
    drawn_token_ids = last.draw.token_ids
    assert drawn_token_ids is not None
    last_drawn = [entry.sequence for entry in last.plan.drawn]
    if [entry.sequence for entry in plan.scheduled] == last_drawn:
        # The usual case needs no kernel: every sequence goes on, one row each.
        assert batch.token_ids.shape == drawn_token_ids.shape
        return replace(batch, token_ids=drawn_token_ids)
    last_rows = {sequence: row for row, sequence in enumerate(last_drawn)}
    ends = itertools.accumulate(entry.num_rows for entry in plan.scheduled)
    filled = [
        (end - 1, last_rows[entry.sequence])
        for entry, end in zip(plan.scheduled, ends, strict=True)
        if entry.sequence.num_pending
    ]
    if not filled:
        return batch
    rows, sources = uploaded_pairs(filled, batch.token_ids.device)
    token_ids = batch.token_ids.index_copy(0, rows, drawn_token_ids.index_select(0, sources))
    return replace(batch, token_ids=token_ids)
