"""One request while it runs: its tokens, its KV and how a round's tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from services.target.grammars.matcher import GrammarMatcher
from services.target.prediction import Prediction
from services.target.requests.request import GenerationRequest, ModelLimits
from shared.generation import SpeculationStats
from shared.kv.leases import KvLease
from shared.tokens import FinishReason, SamplingParams, ThinkingBudget

_LATEST_START = 16
"""Tokens of an output after which a model that has not begun to think will not."""


@dataclass(frozen=True, slots=True)
class _Thought:
    """The progress of an output's reasoning.

    Attributes:
        num_tokens: of the output.
        num_thought: None before the thoughts have begun.
    """

    budget: ThinkingBudget
    num_tokens: int = 0
    num_thought: int | None = None

    @classmethod
    def begin(cls, budget: ThinkingBudget) -> _Thought:
        return cls(budget, num_thought=None if budget.start_token_id is not None else 0)

    def after(self, token_id: int) -> _Thought | None:
        """Returns where it stands one token later; None when it will think no more."""
        budget, num_thought = self.budget, self.num_thought
        if token_id == budget.end_token_id:
            return None
        if num_thought is not None:
            num_thought += 1
        elif token_id == budget.start_token_id:
            num_thought = 0
        elif self.num_tokens + 1 >= _LATEST_START:
            return None
        return replace(self, num_tokens=self.num_tokens + 1, num_thought=num_thought)

    @property
    def is_over(self) -> bool:
        return self.num_thought is not None and self.num_thought >= self.budget.max_tokens


class TokenRules:
    """The rules of one sequence. Owned by the engine thread."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._phrases = sampling.bad_phrases
        self._thought = None if sampling.thinking is None else _Thought.begin(sampling.thinking)
        self._longest = max((len(phrase) - 1 for phrase in self._phrases), default=0)
        self._tail: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParams) -> TokenRules | None:
        """Returns the rules of a request; None when it has none."""
        return cls(sampling) if sampling.bad_phrases or sampling.thinking is not None else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ruled any more."""
        return not self._phrases and self._thought is None

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""
        if self._longest:
            self._tail = (*self._tail, token_id)[-self._longest :]
        if self._thought is not None:
            self._thought = self._thought.after(token_id)

    def banned_after(self, path: SequenceOf[int]) -> frozenset[int]:
        """Returns the tokens that may not follow the committed ones and a path of a tree."""
        tokens = (*self._tail, *path)
        return frozenset(
            phrase[-1]
            for phrase in self._phrases
            if tokens[len(tokens) - len(phrase) + 1 :] == phrase[:-1]
            and len(tokens) >= len(phrase) - 1
        )

    def forced_after(self, path: SequenceOf[int]) -> int | None:
        """Returns the one token that may follow: the end of thoughts that have been long enough."""
        thought = self._thought
        for token_id in path:
            if thought is None:
                return None
            thought = thought.after(token_id)
        return thought.budget.end_token_id if thought is not None and thought.is_over else None


@dataclass(slots=True, eq=False)
class Sequence:
    """A running or waiting request.

    Invariants: `token_ids` are committed and never taken back. After them come `num_pending` tokens
    that the device has drawn and the host has not read. The KV of the first `num_computed` of all
    these is in the lease's pages once the launched steps have run; at least one, the last, is not
    computed yet.

    Attributes:
        token_ids: prompt, then output.
        num_pending: at most 1 but while a step is launched behind another, then 2.
        num_computed: tokens whose KV is valid, or will be by the step in flight; 0 without a lease.
        lease: None while waiting.
        round: counts commits; fences candidates.
        finish_reason: set by the commit that ends the sequence.
        stop_token_id: the token that ended it, if one did.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        next_scored: position of the next prompt token that gets a log probability; the launched
            steps have scored those before. The prompt's length when none is left.
        matcher: how far the output has got in the request's grammar, if it has one.
        weight_version: of the weights that the last tokens were drawn with.
        rules: of the request about what follows what, while there are any.
        prediction: of the output, while it is of use; then drafts take over.
        decided_s: engine clock at the last commit, or when it left the queue.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        max_output_tokens: the request's bound, clamped to the context.
        stop_token_ids: tokens that end this sequence.
    """

    sequence_id: int
    request: GenerationRequest
    limits: ModelLimits
    token_ids: list[int] = field(init=False)
    num_pending: int = 0
    num_computed: int = 0
    lease: KvLease | None = None
    round: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    started: bool = False
    decided_s: float = 0.0
    weight_version: str | None = None
    matcher: GrammarMatcher | None = field(init=False)
    rules: TokenRules | None = field(init=False)
    prediction: Prediction | None = field(init=False)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_prompt_tokens: int = field(init=False)
    next_scored: int = field(init=False)
    max_output_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        request, limits = self.request, self.limits
        stop, sampling, scoring = request.stop, request.sampling, request.prompt_scoring
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.matcher = None if request.grammar is None else request.grammar.matcher()
        has_rules = sampling.bad_words or sampling.thinking is not None
        self.rules = TokenRules.of(sampling) if has_rules else None
        predicted = () if request.speculation_disabled else request.predicted_token_ids
        self.prediction = Prediction(predicted) if predicted else None
        # Nothing predicts the first token.
        self.next_scored = self.num_prompt_tokens if scoring is None else max(scoring.start, 1)
        room = limits.max_sequence_tokens - self.num_prompt_tokens
        self.max_output_tokens = min(stop.max_output_tokens, room)
        self.stop_token_ids = limits.end_token_ids(stop)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def open_lease(self) -> KvLease:
        """The lease of a running sequence."""
        assert self.lease is not None
        return self.lease

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def has_output(self) -> bool:
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Output tokens that may still be drawn."""
        return self.max_output_tokens - self.num_output_tokens - self.num_pending

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are left that want a log probability."""
        return self.next_scored < self.num_prompt_tokens

    @property
    def is_masked(self) -> bool:
        """Whether the host says which tokens may be drawn, after each path of a tree."""
        return self.matcher is not None or self.rules is not None

    def banned_token_ids(self, depth: int) -> frozenset[int]:
        """Tokens that may not be drawn so far down a tree, which hangs off the committed and
        pending ones: no stop token before the minimum length."""
        num_before = self.num_output_tokens + self.num_pending + depth
        is_too_short = num_before < self.request.stop.min_output_tokens
        return self.stop_token_ids if is_too_short else frozenset()

    def cancel(self) -> None:
        """Ends the sequence; what is in flight for it will not be committed."""
        self.finish_reason = FinishReason.CANCELLED

    def commit(self, drawn_token_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Appends tokens up to and including the one that ends the sequence.

        Returns:
            The tokens that were appended, at least one.
        """
        assert self.finish_reason is None
        assert drawn_token_ids
        stop_token_ids = self.stop_token_ids
        committed: list[int] = []
        for token_id in drawn_token_ids:
            committed.append(token_id)
            self.token_ids.append(token_id)
            if self.prediction is not None or self.rules is not None:
                self._follow(token_id)
            if token_id in stop_token_ids:
                self.finish_reason, self.stop_token_id = FinishReason.STOP, token_id
                break
            if self.matcher is not None:
                self.matcher.advance(token_id)
                if self.matcher.has_ended:
                    self.finish_reason = FinishReason.STOP
                    break
            if self.num_output_tokens == self.max_output_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        self.round += 1
        return tuple(committed)

    def _follow(self, token_id: int) -> None:
        """Takes rules and prediction on by one committed token."""
        if self.prediction is not None:
            self.prediction.advance(token_id)
            if self.prediction.is_over:
                self.prediction = None
        if self.rules is not None:
            self.rules.advance(token_id)
            if self.rules.is_idle:
                self.rules = None
