"""What a client saw of one answer, and the figures of many within a window of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.load.figures import percentile


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Times are seconds of the monotonic clock, which all processes share.

    Attributes:
        due_s: when it should be sent: in an open loop it may be late, and that counts.
        first_s: arrival of the first token.
        last_s: end of the stream.
        num_accepted: draft tokens among its tokens.
        num_verified: rounds that verified a tree.
        num_cached: prompt tokens that the prefix cache had.
        error: why it failed; None when it did not. The counts are 0 then.
    """

    due_s: float
    first_s: float
    last_s: float
    num_tokens: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    error: str | None = None

    @property
    def num_rounds(self) -> int:
        """Target steps that drew tokens: each commits accepted ones and one more."""
        return self.num_tokens - self.num_accepted

    def share_within(self, window: Window) -> float:
        """Returns the share of its decoding time that lies within a window."""
        if self.last_s <= self.first_s:
            return float(window.start_s <= self.first_s < window.end_s)
        overlap_s = min(self.last_s, window.end_s) - max(self.first_s, window.start_s)
        return max(0.0, overlap_s) / (self.last_s - self.first_s)


@dataclass(frozen=True, slots=True)
class Window:
    """A time that figures are of, in seconds of the monotonic clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What a window shows. None where nothing happened that it could be read off.

    Attributes:
        first_ms: time to the first token, by percent, of the requests whose first token came in it.
        round_ms: time a sequence that decodes waits for a round; steps that read prompts count.
        tokens_per_round: with the bonus token, plain rounds among them.
        verified_share: of the rounds, those that verified a tree.
        num_running: requests in flight on average, waiting for the first token included.
        cached_share: of the prompt tokens of those requests.
    """

    tokens_per_s: float
    requests_per_s: float
    first_ms: dict[int, float]
    round_ms: float | None
    tokens_per_round: float | None
    verified_share: float | None
    num_running: float
    request_s: float | None
    cached_share: float | None
    num_failed: int
    first_error: str | None


PERCENTS = (50, 99)


def figures_of(answers: Sequence[Answer], window: Window) -> Figures:
    """Returns the figures of a window.

    An answer's tokens and rounds are spread evenly over its decoding time, so that answers that
    begin or end outside of the window count for the part within.
    """
    good = [each for each in answers if each.error is None]
    failed = [each for each in answers if each.error is not None]
    shares = [each.share_within(window) for each in good]
    num_tokens = _weighted([each.num_tokens for each in good], shares)
    num_rounds = _weighted([each.num_rounds for each in good], shares)
    num_verified = _weighted([each.num_verified for each in good], shares)
    decoding_s = _weighted([each.last_s - each.first_s for each in good], shares)
    begun = [each for each in good if window.start_s <= each.first_s < window.end_s]
    ended = [each for each in good if window.start_s <= each.last_s < window.end_s]
    first_ms = [1000 * (each.first_s - each.due_s) for each in begun]
    num_prompt = sum(each.num_prompt for each in begun)
    return Figures(
        tokens_per_s=num_tokens / window.length_s,
        requests_per_s=len(ended) / window.length_s,
        first_ms={p: percentile(first_ms, p) for p in PERCENTS if first_ms},
        round_ms=1000 * decoding_s / num_rounds if num_rounds else None,
        tokens_per_round=num_tokens / num_rounds if num_rounds else None,
        verified_share=num_verified / num_rounds if num_rounds else None,
        num_running=sum(_in_flight_s(each, window) for each in good) / window.length_s,
        request_s=sum(each.last_s - each.due_s for each in ended) / len(ended) if ended else None,
        cached_share=sum(each.num_cached for each in begun) / num_prompt if num_prompt else None,
        num_failed=len(failed),
        first_error=failed[0].error if failed else None,
    )


def _weighted(numbers: Sequence[float], shares: Sequence[float]) -> float:
    return sum(number * share for number, share in zip(numbers, shares, strict=True))


def _in_flight_s(answer: Answer, window: Window) -> float:
    return max(0.0, min(answer.last_s, window.end_s) - max(answer.due_s, window.start_s))


def whole(answers: Sequence[Answer]) -> Window:
    """Returns the time from the first request due to the last answer."""
    return Window(min(each.due_s for each in answers), max(each.last_s for each in answers))


def knee(points: Sequence[tuple[float, Figures]]) -> Figures:
    """Returns the closed loop with the most power: requests a second over time of a request.

    Source: Kleinrock 1979, "Power and Deterministic Rules of Thumb for Probabilistic Problems in
    Computer Communications".

    Args:
        points: (concurrency, figures).
    """
    # A closed loop's request takes concurrency / rate; mean times lack those that did not end.
    return max(points, key=lambda point: point[1].tokens_per_s ** 2 / point[0])[1]


def closed_rate(points: Sequence[tuple[float, Figures]], num_running: float) -> float | None:
    """Returns tokens/s of the closed loop at so many running requests, on straight lines between
    its points and through zero; None above them."""
    below = (0.0, 0.0)
    for concurrency, figures in sorted(points, key=lambda point: point[0]):
        above = (concurrency, figures.tokens_per_s)
        if num_running <= concurrency:
            share = (num_running - below[0]) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        below = above
    return None
