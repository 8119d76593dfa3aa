"""A running request: its tokens, its KV lease, and the commit of a round's tokens."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from services.target.grammars.matcher import GrammarMatcher
from services.target.requests.request import GenerationRequest, ModelLimits
from shared.generation import SpeculationStats
from shared.kv.leases import KvLease
from shared.tokens import EMPTY_TREE, FinishReason, SamplingParams, ThinkingBudget, TokenTree

_LATEST_START = 16
"""A model that has not begun to think within this many output tokens is taken not to think."""


@dataclass(frozen=True, slots=True)
class _Thinking:
    """The progress of an output's reasoning.

    Attributes:
        num_tokens: tokens of the output.
        num_thought: tokens of the reasoning; None before it has begun.
    """

    budget: ThinkingBudget
    num_tokens: int = 0
    num_thought: int | None = None

    @classmethod
    def begin(cls, budget: ThinkingBudget) -> _Thinking:
        return cls(budget, num_thought=None if budget.start_token_id is not None else 0)

    def after(self, token_id: int) -> _Thinking | None:
        """Returns the progress one token later; None once the budget no longer applies."""
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
    """The bad phrases and the thinking budget of one sequence. Owned by the engine thread."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._phrases = sampling.bad_phrases
        self._thinking = None if sampling.thinking is None else _Thinking.begin(sampling.thinking)
        self._max_tail = max((len(phrase) - 1 for phrase in self._phrases), default=0)
        self._tail: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParams) -> TokenRules | None:
        """Returns the rules of a request; None when it has none."""
        return cls(sampling) if sampling.bad_phrases or sampling.thinking is not None else None

    @property
    def is_idle(self) -> bool:
        """Whether no rule applies any more."""
        return not self._phrases and self._thinking is None

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""
        if self._max_tail:
            self._tail = (*self._tail, token_id)[-self._max_tail :]
        if self._thinking is not None:
            self._thinking = self._thinking.after(token_id)

    def banned_after(self, path: SequenceOf[int]) -> frozenset[int]:
        """Returns the tokens that may not follow the committed tokens and a path of a tree."""
        tokens = (*self._tail, *path)
        return frozenset(
            phrase[-1]
            for phrase in self._phrases
            if tokens[len(tokens) - len(phrase) + 1 :] == phrase[:-1]
            and len(tokens) >= len(phrase) - 1
        )

    def forced_after(self, path: SequenceOf[int]) -> int | None:
        """Returns the one token that may follow the committed tokens and a path: the end token of
        reasoning whose budget is used up. None if no token is forced."""
        thinking = self._thinking
        for token_id in path:
            if thinking is None:
                return None
            thinking = thinking.after(token_id)
        return thinking.budget.end_token_id if thinking is not None and thinking.is_over else None


@dataclass(slots=True, eq=False)
class Sequence:
    """A running or waiting request.

    Invariants: `token_ids` are committed and never taken back. They are followed by `num_pending`
    tokens that the device has drawn and the host has not read. The KV of the first `num_computed`
    of all these tokens is in the lease's pages once the launched steps have run. The last token is
    not computed yet.

    Attributes:
        token_ids: prompt, then output.
        num_pending: at most 1; 2 while a step is launched behind another one.
        num_computed: tokens whose KV is valid after the step in flight; 0 without a lease.
        lease: None while waiting.
        round: number of commits; a candidate tree of another round is stale.
        finish_reason: set by the commit that ends the sequence.
        stop_token_id: the token that ended the sequence, if one did.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        next_scored: position of the next prompt token that gets a log probability; the launched
            steps have scored those before. The prompt's length when none is left.
        matcher: the output's state in the request's grammar, if it has one.
        weight_version: version of the weights that drew the last tokens.
        rules: the request's bad phrases and thinking budget, while any applies.
        prediction: the predicted output, while trees are made from it; then drafts take over.
        decided_s: engine clock at the last commit, or when the sequence left the queue.
        left_draft_in: the round in which it last left a draft; None before.
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
    left_draft_in: int | None = None
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
        # No row scores the first token: it has no token before it.
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
        """Whether prompt tokens are left that need a log probability."""
        return self.next_scored < self.num_prompt_tokens

    @property
    def is_masked(self) -> bool:
        """Whether the host masks the tokens that may be drawn after each path of a tree."""
        return self.matcher is not None or self.rules is not None

    def banned_token_ids(self, depth: int) -> frozenset[int]:
        """Returns the tokens that may not be drawn at this depth of a tree whose root is the last
        committed or pending token: stop tokens, before the minimum length is reached."""
        num_before = self.num_output_tokens + self.num_pending + depth
        is_too_short = num_before < self.request.stop.min_output_tokens
        return self.stop_token_ids if is_too_short else frozenset()

    def cancel(self) -> None:
        """Ends the sequence; its rows in flight will not be committed."""
        self.finish_reason = FinishReason.CANCELLED

    def commit(self, drawn_token_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Appends tokens up to and including the one that ends the sequence.

        Returns:
            The appended tokens, at least one.
        """
        assert self.finish_reason is None
        assert drawn_token_ids
        stop_token_ids = self.stop_token_ids
        committed: list[int] = []
        for token_id in drawn_token_ids:
            committed.append(token_id)
            self.token_ids.append(token_id)
            if self.prediction is not None or self.rules is not None:
                self._advance_rules(token_id)
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

    def _advance_rules(self, token_id: int) -> None:
        """Passes a committed token to rules and prediction; drops those that no longer apply."""
        if self.prediction is not None:
            self.prediction.advance(token_id)
            if self.prediction.is_over:
                self.prediction = None
        if self.rules is not None:
            self.rules.advance(token_id)
            if self.rules.is_idle:
                self.rules = None


_LENGTHS = ((8, 32), (0, 16))
"""Pairs: from so many predicted tokens in a row on, a tree has so many levels."""
_SIDE_LENGTH = 8
_MAX_POSITIONS = 3
_MATCH_LENGTHS = (8, 4, 2)
"""Numbers of last output tokens that are searched for, in this order."""
_MAX_REPLACED = 3
_MAX_DELETED = 32
_MAX_MISMATCHED = 64
"""After more mismatched tokens in a row, drafts take over for good."""
_ITEM_BYTES = array("i").itemsize


class Prediction:
    """Text that a client predicts to recur in the output. Owned by the engine thread.

    While the output follows the prediction, the next predicted tokens are its tree. When the output
    leaves the prediction, its position there is searched for: next to an inserted, replaced or
    deleted token, and wherever the last tokens of the output occur.
    """

    def __init__(self, token_ids: SequenceOf[int]) -> None:
        self._tokens = tuple(token_ids)
        self._bytes = array("i", self._tokens).tobytes()
        self._tail: deque[int] = deque(maxlen=_MATCH_LENGTHS[0])
        # Likely positions of the output in the prediction, the likeliest first; none if unknown.
        self._positions = [0]
        # Where the output left the prediction, and how many tokens have mismatched since.
        self._left_at = 0
        self._num_mismatched = 0
        self._num_matched = 0

    @property
    def is_over(self) -> bool:
        """Whether the prediction is of no more use."""
        return self._num_mismatched > _MAX_MISMATCHED

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""
        self._tail.append(token_id)
        positions = self._positions or self._search()
        kept = [start + 1 for start in positions if self._tokens[start : start + 1] == (token_id,)]
        if kept:
            self._num_matched, self._num_mismatched = self._num_matched + 1, 0
        else:
            if not self._num_mismatched:
                self._left_at = positions[0] if positions else len(self._tokens)
            self._num_matched, self._num_mismatched = 0, self._num_mismatched + 1
        self._positions = [position for position in kept if position < len(self._tokens)]

    def tree(self) -> TokenTree:
        """Returns the tree of likely next tokens, perhaps empty."""
        if not self._positions:
            self._positions = self._search()
        length = next(length for least, length in _LENGTHS if self._num_matched >= least)
        chains = [
            self._tokens[position : position + (_SIDE_LENGTH if rank else length)]
            for rank, position in enumerate(self._positions)
        ]
        return _merged(chains) if chains else EMPTY_TREE

    def _search(self) -> list[int]:
        """Returns likely positions of an output that has left the prediction."""
        positions = [*self._at_last_tokens(), *self._near_edit()]
        inside = [position for position in dict.fromkeys(positions) if position < len(self._tokens)]
        return inside[:_MAX_POSITIONS]

    def _near_edit(self) -> Iterator[int]:
        """Yields the positions after a small edit: tokens replaced, deleted, or inserted."""
        if not 0 < self._num_mismatched <= _MAX_REPLACED:
            return
        yield self._left_at + self._num_mismatched
        if self._num_mismatched == 1:
            deleted = self._tokens[self._left_at + 1 : self._left_at + _MAX_DELETED]
            if self._tail[-1] in deleted:
                yield self._left_at + 2 + deleted.index(self._tail[-1])
            yield self._left_at

    def _at_last_tokens(self) -> Iterator[int]:
        """Yields the position behind the longest match of the last output tokens: behind the next
        occurrence, else behind the first."""
        tail = tuple(self._tail)
        for length in _MATCH_LENGTHS:
            if len(tail) >= length:
                start = self._find(tail[-length:], self._left_at)
                start = self._find(tail[-length:], 0) if start is None else start
                if start is not None:
                    yield start + length
                    return

    def _find(self, token_ids: SequenceOf[int], start: int) -> int | None:
        wanted, offset = array("i", token_ids).tobytes(), start * _ITEM_BYTES
        while (offset := self._bytes.find(wanted, offset)) >= 0:
            if offset % _ITEM_BYTES == 0:
                return offset // _ITEM_BYTES
            offset += 1
        return None


def _merged(chains: SequenceOf[SequenceOf[int]]) -> TokenTree:
    """Returns the tree of all chains; chains share the nodes of equal prefixes."""
    nodes: dict[tuple[int | None, int], int] = {}
    for chain in chains:
        parent: int | None = None
        for token_id in chain:
            parent = nodes.setdefault((parent, token_id), len(nodes))
    return TokenTree(tuple(token_id for _, token_id in nodes), tuple(parent for parent, _ in nodes))
