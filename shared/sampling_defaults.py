"""Sampling defaults a model brings along in `generation_config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointError
from shared.tokens import SamplingParams

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request says nothing. OpenAI's are temperature 1 and everything else off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, folder: Path) -> SamplingDefaults:
        """Returns what the model's author recommends, OpenAI's defaults for the rest.

        `do_sample` is not read: whoever wants greedy decoding asks for temperature 0.

        Raises:
            CheckpointError: the file is no JSON object or holds a value out of range.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
            defaults = cls(
                **{name: config[name] for name in _NAMES if config.get(name) is not None}
            )
            defaults._check()
        except Exception as error:
            raise CheckpointError(f"{path} holds no usable sampling defaults: {error}") from error
        return defaults

    def _check(self) -> None:
        SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
