"""Rules about the next token that depend on the tokens before it: bad phrases, and how long the
model may think. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.tokens import SamplingParams, ThinkingBudget

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

    def banned_after(self, path: Sequence[int]) -> frozenset[int]:
        """Returns the tokens that may not follow the committed ones and a path of a tree."""
        tokens = (*self._tail, *path)
        return frozenset(
            phrase[-1]
            for phrase in self._phrases
            if tokens[len(tokens) - len(phrase) + 1 :] == phrase[:-1]
            and len(tokens) >= len(phrase) - 1
        )

    def forced_after(self, path: Sequence[int]) -> int | None:
        """Returns the one token that may follow: the end of thoughts that have been long enough."""
        thought = self._thought
        for token_id in path:
            if thought is None:
                return None
            thought = thought.after(token_id)
        return thought.budget.end_token_id if thought is not None and thought.is_over else None
