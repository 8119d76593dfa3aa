"""Log probabilities of prompt tokens: queued with a step, read when it is committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from services.target.requests.request import PromptScored
from services.target.sequence import Sequence as TargetSequence
from services.target.step_plan import ScheduledSequence
from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import HostCopy
from shared.speculation.logprobs import packed_logprobs, unpacked_logprobs


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log probabilities of the scoring rows of one step.

    Attributes:
        spans: for each sequence that scores, the positions of its tokens.
    """

    packed: HostCopy
    spans: tuple[tuple[TargetSequence, range], ...]

    def read(self) -> list[tuple[TargetSequence, PromptScored]]:
        """Waits for the device and returns one event for each sequence."""
        num_top = [_num_top(sequence) for sequence, span in self.spans for _ in span]
        found = iter(unpacked_logprobs(self.packed.read(), num_top, _named(self.spans)))
        return [
            (sequence, PromptScored(span.start, tuple(next(found) for _ in span)))
            for sequence, span in self.spans
        ]


@dataclass(frozen=True, slots=True)
class SplitLogits:
    """The logits of a step, those that score apart from those that draw.

    Attributes:
        drawing: `[L]` int64, the rows of `logits` that draw; None when all of them do.
    """

    logits: Tensor
    drawing: Tensor | None
    scores: PromptScores | None

    def drawn_of(self, values: Tensor) -> Tensor:
        """Returns those of the values of all rows `[L]` that belong to drawing rows."""
        return values if self.drawing is None else values.index_select(0, self.drawing)

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledSequence], logits: Tensor) -> SplitLogits:
        """Queues the scores and counts their tokens as scored.

        Args:
            logits: `[L, V]`; of each sequence the scoring rows, then the drawing ones.
        """
        if not any(entry.scored for entry in scheduled):
            return cls(logits, None, None)
        scoring: list[int] = []
        drawing: list[int] = []
        token_ids: list[int] = []
        spans: list[tuple[TargetSequence, range]] = []
        row = 0
        for entry in scheduled:
            num_drawing = 1 + len(entry.tree) if entry.is_complete else 0
            if entry.scored:
                spans.append((entry.sequence, _scored_positions(entry)))
                token_ids += [entry.sequence.token_ids[place] for place in spans[-1][1]]
                scoring += range(row, row + len(entry.scored))
                entry.sequence.next_scored = spans[-1][1].stop
            row += len(entry.scored)
            drawing += range(row, row + num_drawing)
            row += num_drawing
        index = uploaded_numbers([scoring, token_ids], logits.device)
        width = max(_num_top(each) for each, _ in spans)
        packed = packed_logprobs(logits.index_select(0, index[0]), index[1], width, _named(spans))
        rows = uploaded_numbers(drawing, logits.device)
        scores = PromptScores(HostCopy(packed), tuple(spans))
        return cls(logits.index_select(0, rows), rows, scores)


def _named(spans: Iterable[tuple[TargetSequence, range]]) -> list[Sequence[int]]:
    """Returns the tokens that are wanted at each position beside the likeliest."""
    return [sequence.request.logprob_token_ids for sequence, span in spans for _ in span]


def _scored_positions(entry: ScheduledSequence) -> range:
    """Returns the positions of the scored tokens: each one after its row."""
    return range(entry.start + entry.scored.start + 1, entry.start + entry.scored.stop + 1)


def _num_top(sequence: TargetSequence) -> int:
    scoring = sequence.request.prompt_scoring
    assert scoring is not None
    return scoring.num_top
