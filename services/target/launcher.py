"""Queues the work of a step on the device. Nothing here waits for any of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.target.drafts.feature_feed import FeatureFeed
from services.target.draw import Decision, Draw
from services.target.launched_step import LaunchedStep
from services.target.prompt_scores import SplitLogits
from services.target.step import UNREAD, kv_moves, sequence_rows
from services.target.step_plan import ScheduledSequence, StepPlan
from services.target.verifier import Verifier
from shared.kv.batch import ForwardBatch, build_batch
from shared.kv.decode_batch import DecodeBatches
from shared.kv.upload import uploaded_pairs
from shared.runtime.runner import ModelRunner


class Launcher:
    """Between a plan and the device. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, verifier: Verifier, features: FeatureFeed) -> None:
        self._runner = runner
        self._verifier = verifier
        self._features = features
        self._decode_batches = DecodeBatches(runner.page_size, runner.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, last: LaunchedStep | None, *, start_s: float) -> LaunchedStep:
        """Queues forward and draw, and counts the rows as computed.

        Args:
            last: the step in flight, whose tokens this one reads on the device.
        """
        batch = self._packed(plan.scheduled)
        if last is not None and last.draw is not None:
            batch = _with_drawn_tokens(batch, plan, last)
        output = self._runner.run(batch, capture_layers=self._features.captured_layers)
        self._features.store(plan, batch.slots, output)
        drawn = plan.drawn
        draw = None
        split = SplitLogits.of(plan.scheduled, output.logits)
        if drawn:
            draw = self._verifier.draw(
                drawn,
                split.logits,
                positions=split.drawn_of(_of_logit_rows(batch, batch.positions)),
                input_ids=split.drawn_of(_of_logit_rows(batch, batch.token_ids)),
            )
        for entry in plan.scheduled:
            entry.sequence.num_computed += entry.num_rows
            entry.sequence.num_pending += entry.is_complete
        return LaunchedStep(
            plan,
            drawn,
            draw,
            split.scores,
            len(batch.token_ids),
            start_s,
            _allows_run_ahead(drawn, draw),
        )

    def _packed(self, scheduled: Sequence[ScheduledSequence]) -> ForwardBatch:
        if all(entry.is_plain for entry in scheduled):
            sequences = [entry.sequence for entry in scheduled]
            return self._decode_batches.build(
                [UNREAD if each.num_pending else each.token_ids[-1] for each in sequences],
                [entry.start for entry in scheduled],
                [each.open_lease for each in sequences],
            )
        rows = [sequence_rows(entry) for entry in scheduled]
        return build_batch(rows, page_size=self._runner.page_size, device=self._runner.device)

    def keep_accepted(self, decided: Sequence[tuple[ScheduledSequence, Decision]]) -> None:
        """Brings KV and features of accepted nodes into path order."""
        moves = [
            move
            for entry, decision in decided
            if decision.accepted_nodes
            for move in kv_moves(entry, decision.accepted_nodes, self._runner.page_size)
        ]
        if moves:
            self._features.move(*self._runner.move(moves))


def _allows_run_ahead(drawn: Sequence[ScheduledSequence], draw: Draw | None) -> bool:
    if draw is None:
        return True
    if draw.token_ids is None or any(each.node_indices for each in drawn):
        return False  # the host decides how much of a tree is accepted
    return not any(each.sequence.needs_host_before_next_step for each in drawn)


def _with_drawn_tokens(batch: ForwardBatch, plan: StepPlan, last: LaunchedStep) -> ForwardBatch:
    """Fills in the tokens that `last` draws: rows that the host does not know."""
    assert last.draw is not None
    drawn_token_ids = last.draw.token_ids
    assert drawn_token_ids is not None
    before = [entry.sequence for entry in last.drawn]
    if [entry.sequence for entry in plan.scheduled] == before:
        # The usual case, without a launch: every sequence goes on, one row each.
        assert batch.token_ids.shape == drawn_token_ids.shape
        return replace(batch, token_ids=drawn_token_ids)
    places = {sequence: place for place, sequence in enumerate(before)}
    ends = itertools.accumulate(entry.num_rows for entry in plan.scheduled)
    filled = [
        (end - 1, places[entry.sequence])
        for entry, end in zip(plan.scheduled, ends, strict=True)
        if entry.sequence.num_pending
    ]
    if not filled:
        return batch
    rows, sources = uploaded_pairs(filled, batch.token_ids.device)
    token_ids = batch.token_ids.index_copy(0, rows, drawn_token_ids.index_select(0, sources))
    return replace(batch, token_ids=token_ids)


def _of_logit_rows(batch: ForwardBatch, values: Tensor) -> Tensor:
    """Returns the values of the rows with logits; they ascend, so as many as rows are all."""
    if len(batch.logit_rows) == len(values):
        return values
    return values.index_select(0, batch.logit_rows)
