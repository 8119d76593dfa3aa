"""Sampling parameters and seeds of requests that set none; limits and priors of speculation."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import CheckpointError, InvalidArgument
from shared.model_files import read_json
from shared.tokens import SamplingParams

_MASK = 2**64 - 1

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def drawn_seed() -> int:
    """Returns a random seed in [0, 2^63), which an int64 holds."""
    return secrets.randbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of one of `n` choices: the request's for the first, distinct ones after.

    Source: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", mix64.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


@dataclass(frozen=True, slots=True)
class IntegerLimit:
    """The range of an optional integer field.

    Attributes:
        field: its name in JSON, also used in the target's errors.
        lowest, highest: inclusive.
    """

    field: str
    lowest: int
    highest: int

    def checked(self, value: int | None) -> int | None:
        """Returns the value; None if the request has none.

        Raises:
            InvalidArgument: the value is out of range.
        """
        if value is not None and not self.lowest <= value <= self.highest:
            limits = f"[{self.lowest}, {self.highest}]"
            raise InvalidArgument.out_of_range(self.field, value, limits)
        return value


TREE_STEPS = IntegerLimit("speculation.num_steps", 1, 32)
"""Depth of trees."""
TREE_TOKENS = IntegerLimit("speculation.num_draft_tokens", 1, 257)
"""Most rows of a verified tree, root included."""
OUTCOMES = IntegerLimit("speculation.outcome_budget", 0, 64)
"""Most verdicts for which a draft drafts ahead."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of parameters that a request does not set. OpenAI's are temperature 1 and the rest
    off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, folder: Path) -> SamplingDefaults:
        """Returns the defaults in the model's `generation_config.json`, completed by OpenAI's.

        `do_sample` is not read: requests ask for greedy decoding by temperature 0.

        Raises:
            CheckpointError: the file is no JSON object or holds a value out of range.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = read_json(path)
            defaults = cls(
                **{name: config[name] for name in _NAMES if config.get(name) is not None}
            )
            SamplingParams(**asdict(defaults))
        except Exception as error:
            raise CheckpointError(f"{path} holds no usable sampling defaults: {error}") from error
        return defaults


# The acceptance estimate by which a draft ranks likely verdicts: a weighted mean of a token's draft
# probability and of the measured share of tokens of its rank that the target accepted. The first
# says which tokens are sure, the second how far to trust the draft.

MEASURED_WEIGHT = 0.5
"""Weight of the measured share in the mean."""
PRIOR_TOKENS = 8.0
"""Weight of the prior, in verified tokens: soon outweighed by measurements."""
PRIOR_SHARE = 0.5
"""Prior share of each rank in what the ranks before it leave: a geometric distribution."""
MEMORY_TOKENS = 4096.0
"""Verified tokens beyond which older ones count for less, because texts change."""
