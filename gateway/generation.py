"""What the gateway asks of a target, and what a target answers. Plain data.

A generation is one choice of one HTTP request: one prompt continued once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import OutriderError
from shared.tokens import FinishReason, SamplingParams, StopParams, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One prompt to continue.

    Attributes:
        prompt_token_ids: at least one.
        sampling: its `seed` counts only when `has_seed`; else the target draws one.
        top_logprobs: None asks for no log probabilities; 0 for those of the drawn tokens only.
        trace_id: for logs and traces.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    has_seed: bool = False
    top_logprobs: int | None = None
    is_speculation_disabled: bool = False
    trace_id: str = ""

    @property
    def num_reserved_tokens(self) -> int:
        """Most tokens the sequence can grow to: its weight when a target is picked."""
        return len(self.prompt_token_ids) + self.stop.max_output_tokens


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a target serves.

    Attributes:
        max_context_tokens: largest prompt plus output.
        tokenizer_sha256: lower-case hexadecimal.
    """

    model_id: str
    tokenizer_sha256: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class TargetState(enum.Enum):
    """Whether requests may be sent to a target. Only `SERVING` takes them."""

    CONNECTING = "connecting"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    MISMATCHED = "mismatched"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation counters of one generation.

    Attributes:
        num_verified_rounds: rounds in which a tree was verified.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted, without bonus tokens.
        histogram: element i counts verified rounds that accepted exactly i nodes.
    """

    num_verified_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    histogram: tuple[int, ...] = ()

    def with_round(self, num_drafted: int, num_accepted: int) -> SpeculationStats:
        """Returns the counters after one more verified round."""
        histogram = [*self.histogram, *[0] * (num_accepted + 1 - len(self.histogram))]
        histogram[num_accepted] += 1
        return SpeculationStats(
            self.num_verified_rounds + 1,
            self.num_drafted + num_drafted,
            self.num_accepted + num_accepted,
            tuple(histogram),
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the target's queue."""

    num_cached_tokens: int


@dataclass(slots=True)
class Delta:
    """Tokens of one engine step.

    Not frozen: one is made for every request and step, and freezing triples its cost.

    Attributes:
        logprobs: one entry for each token, or empty.
        num_accepted: how many tokens, counted from the front, are accepted draft tokens.
        num_drafted: draft nodes verified in the step; 0 when it ran without a tree.
    """

    token_ids: list[int]
    num_accepted: int
    logprobs: Sequence[TokenLogprobs] = ()
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a generation that ended well.

    Attributes:
        stop_token_id: the token that ended it; None when the length did.
    """

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Last event of a generation that did not.

    Attributes:
        may_retry: another target may do better: this one was full, leaving or lost.
    """

    error: OutriderError
    may_retry: bool = False


Event = Started | Delta | Finished | Failed
