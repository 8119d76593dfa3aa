"""The nouns every service shares: sampling parameters, token trees, candidates and verdicts.

Plain frozen data without torch, protobuf or grpc, so that policies can be read and tested alone.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from shared.errors import InvalidArgument

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_NAMED_LOGPROBS = 128
MAX_SALT_CHARACTERS = 256
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 64


CHAIN_PARENTS: tuple[int | None, ...] = (None, *range(255))
"""Parent indices of the longest chain; a shorter chain has the first of them."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The limit on reasoning tokens before the answer.

    Attributes:
        max_tokens: most reasoning tokens, at least 0; `end_token_id` follows them.
        end_token_id: the token that ends reasoning.
        start_token_id: the token that starts reasoning, if the model generates it; None if the
            prompt holds it.
    """

    max_tokens: int
    end_token_id: int
    start_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            limit = "0 or more"
            raise InvalidArgument.out_of_range("thinking_token_budget", self.max_tokens, limit)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, for the draw of a token from the target's logits.

    Attributes:
        temperature: in [0, 2]; 0 takes the highest logit.
        top_k: keeps the k highest logits; 0 is off.
        top_p: in (0, 1]; keeps the smallest set of tokens whose mass reaches it; 1 is off.
        min_p: in [0, 1]; drops tokens below `min_p` times the highest probability; 0 is off.
        frequency_penalty: in [-2, 2]; subtracted per occurrence in the output.
        presence_penalty: in [-2, 2]; subtracted once for a token that occurs in the output.
        repetition_penalty: in (0, 2]; divides positive and multiplies negative logits of tokens
            that occur in prompt or output; 1 is off.
        logit_bias: token id to a value in [-100, 100], added to the logit.
        allowed_token_ids: no other token is drawn; empty is off.
        bad_words: sequences of at least one token that the output never contains: the last token
            of a sequence is not drawn after its other tokens.
        thinking: the limit on reasoning tokens; None is no limit.
        seed: keys the noise; the output is a function of weights, prompt, parameters and seed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        if self.top_k < 0:
            raise InvalidArgument.out_of_range("top_k", self.top_k, "0 (off) or more")
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.bad_words:
            self._check_words()

    def __reduce__(self) -> tuple[type[SamplingParams], tuple[object, ...]]:
        # Read-only maps cannot be pickled, and some releases of Python 3.11 replace `__getstate__`.
        values = (getattr(self, attribute.name) for attribute in fields(self))
        return SamplingParams, tuple(
            dict(value) if isinstance(value, MappingProxyType) else value for value in values
        )

    def _check_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            limit = f"at most {MAX_BAD_WORDS}"
            raise InvalidArgument.wrong_count("bad_words", len(self.bad_words), "entries", limit)
        for index, word in enumerate(self.bad_words):
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                field, limit = f"bad_words[{index}]", f"[1, {MAX_BAD_WORD_TOKENS}]"
                raise InvalidArgument.wrong_count(field, len(word), "tokens", limit)
        if self.allowed_token_ids and not set(self.allowed_token_ids) - self.bad_token_ids:
            message = "bad_words leaves none of allowed_token_ids"
            raise InvalidArgument.of("SAMPLING_PARAM_OUT_OF_RANGE", "allowed_token_ids", message)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def named_token_ids(self) -> dict[str, Collection[int]]:
        """The token ids in each field that has some; all must be in the vocabulary."""
        thinking = self.thinking
        ends = () if thinking is None else (thinking.end_token_id, thinking.start_token_id or 0)
        return {
            "logit_bias": self.logit_bias.keys(),
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": [token_id for word in self.bad_words for token_id in word],
            "thinking_token_budget": ends,
        }

    @property
    def bad_token_ids(self) -> frozenset[int]:
        """The bad words that are a single token."""
        return frozenset(word[0] for word in self.bad_words if len(word) == 1)

    @property
    def bad_phrases(self) -> tuple[tuple[int, ...], ...]:
        """Bad words of several tokens: whether the last token is banned depends on those before."""
        return tuple(word for word in self.bad_words if len(word) > 1)

    @property
    def shapes_logits(self) -> bool:
        """Whether penalties, biases or banned tokens change the logits of every draw."""
        return bool(
            self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_token_ids
        )


@dataclass(frozen=True, slots=True)
class StopParams:
    """Conditions that end generation.

    Attributes:
        max_output_tokens: at least 1.
        min_output_tokens: stop tokens cannot be drawn before the output has this many tokens.
        stop_token_ids: tokens that end generation, in addition to the model's end tokens.
        ignore_eos: the model's end tokens do not end generation.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_output_tokens < 1:
            raise InvalidArgument.out_of_range("max_tokens", self.max_output_tokens, "at least 1")
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            limit = f"[0, {self.max_output_tokens}], the most tokens of the output"
            raise InvalidArgument.out_of_range("min_tokens", self.min_output_tokens, limit)

    def within(self, num_left: int) -> StopParams:
        """Returns the parameters with both bounds cut to the `num_left` (at least 1) tokens that
        the context has left."""
        if self.max_output_tokens <= num_left:
            return self
        return replace(
            self,
            max_output_tokens=num_left,
            min_output_tokens=min(self.min_output_tokens, num_left),
        )


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Candidate continuations of one sequence, parents before children.

    Attributes:
        token_ids: token of each node.
        parent_indices: index of each node's parent; None is the last committed token.
        log_probs: the draft's natural-log probability of each node given its parent, or empty.
            For ranking and telemetry only, never for acceptance.
    """

    token_ids: tuple[int, ...]
    parent_indices: tuple[int | None, ...]
    log_probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parent_indices) != len(self.token_ids):
            raise InvalidArgument.malformed_tree(
                f"{len(self.token_ids)} token ids but {len(self.parent_indices)} parent indices"
            )
        if len(self.log_probs) not in (0, len(self.token_ids)):
            raise InvalidArgument.malformed_tree(
                f"{len(self.token_ids)} token ids but {len(self.log_probs)} log probabilities"
            )
        if self.parent_indices == CHAIN_PARENTS[: len(self.parent_indices)]:
            return
        for node, parent in enumerate(self.parent_indices):
            if parent is not None and not 0 <= parent < node:
                raise InvalidArgument.malformed_tree(
                    f"node {node} has parent {parent}; a parent must come before its child"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> TokenTree:
        """Returns the tree in which each token is the only child of the one before it."""
        parents = CHAIN_PARENTS[: len(token_ids)]
        if len(parents) < len(token_ids):
            parents = (None, *range(len(token_ids) - 1))
        return cls(tuple(token_ids), parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for children of the last committed token."""
        depths: list[int] = []
        for parent in self.parent_indices:
            depths.append(1 if parent is None else depths[parent] + 1)
        return tuple(depths)

    def only(self, nodes: Sequence[int]) -> TokenTree:
        """Returns the tree of some nodes, ascending; a node's parent must be one of them."""
        return self._subtree(None, nodes)

    def below(self, token_ids: Sequence[int]) -> TokenTree:
        """Returns the subtree below the path of `token_ids`; empty if the tree has no such path or
        no node below it."""
        end: int | None = None
        for token_id in token_ids:
            keys = zip(self.parent_indices, self.token_ids, strict=True)
            end = next((node for node, key in enumerate(keys) if key == (end, token_id)), None)
            if end is None:
                return EMPTY_TREE
        nodes, parents = list[int](), {end}
        for node, parent in enumerate(self.parent_indices):
            if parent in parents:
                nodes.append(node)
                parents.add(node)
        return self._subtree(end, nodes)

    def _subtree(self, root: int | None, nodes: Sequence[int]) -> TokenTree:
        """Returns the tree of some nodes, ascending; a node's parent is `root` or one of them."""
        new_index: dict[int | None, int | None] = {root: None}
        for node in nodes:
            new_index[node] = len(new_index) - 1
        return TokenTree(
            tuple(self.token_ids[node] for node in nodes),
            tuple(new_index[self.parent_indices[node]] for node in nodes),
            tuple(self.log_probs[node] for node in nodes) if self.log_probs else (),
        )

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the node indices from the root's child down to `node`, both included."""
        path: list[int] = []
        current: int | None = node
        while current is not None:
            path.append(current)
            current = self.parent_indices[current]
        return tuple(reversed(path))


EMPTY_TREE = TokenTree((), ())


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a drafted tree. The three numbers mean what they mean in SGLang.

    Attributes:
        num_steps: number of expansions, the depth of the tree; in [0, 32]. Without any, one row
            is verified: a plain step.
        topk: children of a node, and nodes kept per level; in [1, 16]. 1 is a chain.
        num_draft_tokens: rows verified per round, the root included; in [1, 257].
        is_ahead: trees are drafted while the previous trees are verified, for likely verdicts.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    is_ahead: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.num_steps <= 32:
            raise InvalidArgument.out_of_range("num_steps", self.num_steps, "[0, 32]")
        if not 1 <= self.topk <= 16:
            raise InvalidArgument.out_of_range("topk", self.topk, "[1, 16]")
        if not 1 <= self.num_draft_tokens <= 257:
            raise InvalidArgument.out_of_range(
                "num_draft_tokens", self.num_draft_tokens, "[1, 257]"
            )

    @property
    def as_chain(self) -> TreeShape:
        """The chain with the depth of this tree."""
        return self if self.topk == 1 else TreeShape(self.num_steps, 1, self.num_steps + 1)

    @property
    def max_node_count(self) -> int:
        """Most nodes a tree of this shape has; the root is not a node."""
        if self.topk == 1:
            return min(self.num_steps, self.num_draft_tokens - 1)
        return self.num_draft_tokens - 1


ShapeOrPlain = TreeShape | None
"""The shape of the trees that rounds verify; None is plain steps."""


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """The target's request for a draft's next tree of a sequence.

    Attributes:
        shape: of the tree; None leaves the shape to the draft.
        is_paused: no tree is wanted for the next round; the draft only follows committed tokens.
        num_outcomes: most verdicts on that tree to draft ahead for; None leaves it to the draft.
    """

    shape: TreeShape | None = None
    is_paused: bool = False
    num_outcomes: int | None = None


ANY_TREE = TreeRequest()
NO_TREE = TreeRequest(is_paused=True)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft's report about itself, sent with its candidates.

    Attributes:
        draft_s: the drafter's time to draft the candidates, in seconds; None if not reported.
        pinned_shape: the shape that an operator fixed at the draft; tree requests have no effect
            on it.
        is_warming: the draft is warming up, so its candidates are late.
    """

    draft_s: float | None = None
    pinned_shape: TreeShape | None = None
    is_warming: bool = False


NO_REPORT = DraftReport()


@dataclass(frozen=True, slots=True)
class Condition:
    """The verdict a conditional candidate was prepared for.

    Attributes:
        node_index: last accepted node of the round's tree; None when no node is accepted.
        bonus_token_id: the token the target draws after that node.
        candidate_id: the candidate that has the node `node_index`.
    """

    node_index: int | None
    bonus_token_id: int
    candidate_id: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tree for one round of one sequence.

    `round` and `committed_token_count` are its fence: a candidate for any other state is stale. A
    candidate with a condition is for the round after `round`, if the verdict on `round` meets the
    condition.

    Attributes:
        candidate_id: names the tree in conditions and verdicts, unique for the sequence on its
            attachment; None when no candidate is pushed ahead with a condition on this one.
        shape: the shape in which the tree was drafted; None when it is the requested one.
    """

    sequence_id: int
    round: int
    committed_token_count: int
    tree: TokenTree
    condition: Condition | None = None
    candidate_id: int | None = None
    shape: TreeShape | None = None


class Outcome(enum.Enum):
    """The result of a sequence's candidate in a step."""

    VERIFIED = "verified"
    MISSED = "missed"
    STALE = "stale"
    VERIFIED_NEXT_READY = "verified_next_ready"


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """A sequence that the target assigns to a draft.

    Attributes:
        token_ids: every committed token.
        num_prompt_tokens: how many of them are the prompt.
        round: round that the first candidate is for.
        tree_request: the target's request for the first tree.
        request_id, traceparent: the request's, for logs and traces.
        cache_salt: only sequences with the same salt share cache entries.
    """

    sequence_id: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    round: int
    tree_request: TreeRequest = ANY_TREE
    request_id: str = ""
    traceparent: str | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision on one round of one sequence.

    Attributes:
        round: the round decided; the next candidate is for `round + 1`.
        accepted_node_indices: the accepted path, root's child first; empty unless verified.
        committed_token_ids: tokens this round commits: the accepted path, then the bonus token.
            Shorter when the sequence stopped inside the path.
        committed_token_count: prompt plus output tokens after this round.
        tree_request: the target's request for the tree of the next round.
        candidate_id: the candidate that was verified; None when no candidate of the draft was.
        next_candidate_id: the candidate pushed ahead that the target verifies next.
    """

    sequence_id: int
    round: int
    outcome: Outcome
    accepted_node_indices: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    committed_token_count: int
    tree_request: TreeRequest = ANY_TREE
    candidate_id: int | None = None
    next_candidate_id: int | None = None

    @property
    def condition(self) -> Condition:
        """The condition of a candidate that was pushed ahead for exactly this verdict."""
        accepted = self.accepted_node_indices
        return Condition(accepted[-1] if accepted else None, self.bonus_token_id, self.candidate_id)

    @property
    def bonus_token_id(self) -> int:
        return self.committed_token_ids[-1]


class FinishReason(enum.Enum):
    """The reason why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one output position, from the untransformed target logits.

    Attributes:
        log_prob: natural log of the chosen token's probability.
        rank: 1 for the most probable token.
        top: the most probable tokens with their log probabilities, best first, then the tokens
            that the request names.
    """

    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def _check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:
        bracket = "(" if low_open else "["
        raise InvalidArgument.out_of_range(name, value, f"{bracket}{low:g}, {high:g}]")


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A swap of the weights of the target or a draft.

    Attributes:
        time_s: seconds since the epoch.
        algorithm: the algorithm of the draft with the new weights; empty for the target.
    """

    time_s: float
    algorithm: str
    version: str
