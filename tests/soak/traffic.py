"""Random requests: every sampling parameter, prompts that share prefixes, callers who leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from services.target.requests.request import GenerationRequest
from shared.generation import PromptScoring
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import VOCAB_SIZE, request
from tests.helpers.grammars import regex

MAX_PROMPT_TOKENS = 90
MAX_OUTPUT_TOKENS = 60
NUM_PREFIXES = 6
# Over the letters of the tests' small vocabulary; the last one ends by itself.
PATTERNS = ("[abc]*", "(ab|cd)+x?", "[0-2]{1,12}", "abcd{1,3}:")


@dataclass(frozen=True, slots=True)
class Caller:
    """One request and how long its caller stays.

    Attributes:
        leaves_after: steps after which it cancels; None waits for the end.
    """

    request: GenerationRequest
    leaves_after: int | None


class Traffic:
    """An endless source of callers; the same seed gives the same ones."""

    def __init__(self, seed: int, *, share_of_simple: float = 0.0) -> None:
        """`share_of_simple` of all requests ask for nothing that rounds on the device cannot do."""
        self._source = random.Random(seed)
        self._share_of_simple = share_of_simple
        self._prefixes = [
            self._tokens(self._source.randint(4, MAX_PROMPT_TOKENS - 10))
            for _ in range(NUM_PREFIXES)
        ]
        self._samplings: tuple[Callable[[int], SamplingParams], ...] = (
            lambda seed: SamplingParams(temperature=0.0),
            lambda seed: SamplingParams(temperature=1.0, seed=seed),
            self._truncated,
            self._penalised,
            self._biased,
        )

    def caller(self) -> Caller:
        """Returns the next one."""
        source = self._source
        if self._share_of_simple and source.random() < self._share_of_simple:
            sampling = source.choice(self._samplings[:3])(source.randrange(2**63))
            stop = StopParams(source.randint(1, MAX_OUTPUT_TOKENS))
            leaves = source.randint(0, 40) if source.random() < 0.2 else None
            return Caller(request(self._prompt(), sampling, stop), leaves)
        grammar = regex(source.choice(PATTERNS)) if source.random() < 0.15 else None
        prompt = self._prompt()
        asked = request(
            prompt,
            source.choice(self._samplings)(source.randrange(2**63)),
            self._stop(),
            top_logprobs=source.choice((None, None, 0, 3)),
            speculation_disabled=source.random() < 0.1,
            grammar=grammar,
            prompt_scoring=self._scoring(len(prompt)),
            priority=source.choice((0, 0, 0, 1, -1)),
        )
        leaves = source.randint(0, 40) if source.random() < 0.2 else None
        return Caller(asked, leaves)

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def _prompt(self) -> list[int]:
        if self._source.random() < 0.6:
            prefix = self._source.choice(self._prefixes)
            return prefix[: self._source.randint(1, len(prefix))] + self._tokens(
                self._source.randint(0, 10)
            )
        longest = self._source.choice((4, 20, MAX_PROMPT_TOKENS))
        return self._tokens(self._source.randint(1, longest))

    def _stop(self) -> StopParams:
        count = self._source.randint(1, MAX_OUTPUT_TOKENS)
        return StopParams(
            count,
            min_output_tokens=self._source.choice((0, 0, count // 2)),
            stop_token_ids=frozenset(self._source.sample(range(VOCAB_SIZE), k=2)[:1])
            if self._source.random() < 0.4
            else frozenset(),
            ignore_eos=self._source.random() < 0.7,
        )

    def _scoring(self, num_tokens: int) -> PromptScoring | None:
        if self._source.random() >= 0.1:
            return None
        return PromptScoring(self._source.randrange(num_tokens), 2)

    def _truncated(self, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._source.uniform(0.2, 1.8),
            top_k=self._source.choice((0, 1, 5, VOCAB_SIZE)),
            top_p=self._source.choice((1.0, 0.9, 0.4)),
            min_p=self._source.choice((0.0, 0.05)),
            seed=seed,
        )

    def _penalised(self, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._source.choice((0.0, 0.9)),
            frequency_penalty=self._source.uniform(-1.0, 2.0),
            presence_penalty=self._source.uniform(-1.0, 1.0),
            repetition_penalty=self._source.choice((1.0, 1.3, 0.8)),
            seed=seed,
        )

    def _biased(self, seed: int) -> SamplingParams:
        biased = self._source.sample(range(VOCAB_SIZE), k=3)
        return SamplingParams(
            temperature=0.8,
            logit_bias={token: self._source.uniform(-20.0, 5.0) for token in biased},
            seed=seed,
        )
