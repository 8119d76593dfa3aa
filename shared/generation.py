"""Requests to a target and the events of its answers, for target and gateway. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from shared.errors import InvalidArgument, OutriderError
from shared.tokens import MAX_TOP_LOGPROBS, SamplingParams, StopParams, TokenLogprobs, TokenTree


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Selects the prompt tokens that get log probabilities.

    Attributes:
        start: position of the first one; the token at position 0 has none.
        num_top: most probable alternatives per token.
    """

    start: int
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerationParams:
    """One prompt to continue, and the parameters of its generation.

    Attributes:
        request_id: for logs and traces.
        prompt_token_ids: at least one.
        top_logprobs: None returns no log probabilities, 0 only those of the drawn tokens.
        logprobs_after_temperature: log probabilities are after bias, penalties and temperature.
        logprob_token_ids: tokens whose log probabilities are returned at each position.
        prompt_scoring: which prompt tokens get log probabilities; None is none.
        priority: requests with the lowest value are scheduled first.
        speculation_disabled: no trees are drafted.
        draft_algorithm: only drafts of this algorithm are used; None allows any.
        num_draft_steps: depth of trees; None is the target's choice.
        num_draft_tokens: most rows of a verified tree, the root included; None likewise.
        num_outcomes: most verdicts that a draft drafts ahead for; None likewise. At 0 each tree is
            drafted after its verdict.
        wants_trace: every delta has the trace of its round.
        never_learnt: the request is never sent to a learner.
        traceparent: the span that the request is part of; None without tracing.
        cache_salt: the request's cache entries are shared only with requests of the same salt.
        predicted_token_ids: text of which the output may contain long parts.
        wants_routes: return the experts of each token at the end.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    _: KW_ONLY
    top_logprobs: int | None = None
    logprobs_after_temperature: bool = False
    logprob_token_ids: Sequence[int] = ()
    prompt_scoring: PromptScoring | None = None
    priority: int = 0
    speculation_disabled: bool = False
    draft_algorithm: str | None = None
    num_draft_steps: int | None = None
    num_draft_tokens: int | None = None
    num_outcomes: int | None = None
    wants_trace: bool = False
    never_learnt: bool = False
    traceparent: str | None = None
    cache_salt: str = ""
    predicted_token_ids: Sequence[int] = ()
    wants_routes: bool = False


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """The draft that proposed a round's candidates, and its response time.

    Attributes:
        algorithm: of the draft that has the sequence.
        response_s: time from the previous verdict to the arrival of the candidates; 0 if they were
            pushed ahead. None without candidates, and for the first ones, which include the
            draft's prefill.
    """

    algorithm: str
    response_s: float | None


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. The rounds of a sequence follow each other: wait, verify, wait, verify, …

    Attributes:
        tree: the verified tree; empty for a plain step.
        accepted_nodes: nodes of `tree` that were committed, the root's child first.
        num_rows: rows in the forward: committed tokens without KV, and nodes.
        verify_s: from the plan of the step to its verdict.
        wait_s: from the previous verdict, or from leaving the queue, to that plan.
        draft: None when no draft has the sequence.
    """

    round: int
    tree: TokenTree
    accepted_nodes: tuple[int, ...]
    num_rows: int
    verify_s: float
    wait_s: float
    draft: DraftAnswer | None


@dataclass(slots=True)
class SpeculationStats:
    """Counters of one request.

    Attributes:
        num_rounds: decode steps, with or without candidates.
        num_verified_rounds: rounds in which a tree was verified.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted and committed, without bonus tokens.
        num_missed_rounds: rounds that requested a tree and ran without one.
        histogram: element i counts verified rounds that accepted exactly i nodes.
    """

    num_rounds: int = 0
    num_verified_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_missed_rounds: int = 0
    histogram: list[int] = field(default_factory=list)

    def add_verified(self, num_drafted: int, num_accepted: int) -> None:
        self.num_verified_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the target's queue.

    Attributes:
        queue_s: time in the queue.
    """

    num_cached_tokens: int
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of prompt tokens, from one step of the prefill.

    Attributes:
        start: position of the first one, at least 1.
    """

    start: int
    logprobs: Sequence[TokenLogprobs]


@dataclass(slots=True)
class Delta:
    """Tokens committed by one step; the first `num_accepted` of them were drafted.

    Not frozen: one is made for every request and step, and freezing triples the cost.

    Attributes:
        logprobs: one entry for each token, or empty.
        num_drafted: draft nodes verified in the step; 0 for a plain step.
        trace: of the round, if the request wants it.
        weight_version: of the weights from this delta on; None: unchanged since the last delta.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    num_accepted: int = 0
    num_drafted: int = 0
    trace: RoundTrace | None = None
    weight_version: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the delta has only tokens and counts."""
        return not self.logprobs and self.trace is None and self.weight_version is None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error.

    Attributes:
        may_retry: another target may succeed, because this one was full, draining or lost.
    """

    error: OutriderError
    may_retry: bool = False


def check_num_top(field: str, value: int) -> int:
    """Returns `value`, the number of most probable tokens to report per position.

    Raises:
        InvalidArgument: the value is out of range.
    """
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidArgument.out_of_range(field, value, f"[0, {MAX_TOP_LOGPROBS}]")
    return value


def check_token_ids(
    field: str,
    token_ids: Collection[int],
    vocab_size: int,
    *,
    reason: str = "SAMPLING_PARAM_OUT_OF_RANGE",
) -> None:
    """Raises:
    InvalidArgument: an id is not in the vocabulary.
    """
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            message = f"{field} holds token {token_id}; ids must be in [0, {vocab_size})"
            raise InvalidArgument.of(reason, field, message)
