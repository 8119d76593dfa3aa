"""Facts about the model and the target, for other projects' gateways."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.target.settings import TargetSettings
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that hold from start to stop.

    Attributes:
        model_id: name clients pass as `model`.
        pad_token_id, bos_token_id: 0 when the model's config has none.
        sampling_defaults: of the model's generation config, as a JSON object; empty when it leaves
            everything as it is.
        tokenizer_folders: where files of the tokenizer lie, the first hides the others.
        kv_cache_dtype, dtype: as the flags say.
    """

    model_id: str
    model_type: str
    architectures: tuple[str, ...]
    pad_token_id: int
    bos_token_id: int
    sampling_defaults: str
    tokenizer_folders: tuple[Path, ...]
    max_running: int
    page_size: int
    kv_cache_dtype: str
    dtype: str

    @classmethod
    def of(cls, settings: TargetSettings) -> Self:
        """Raises:
        CheckpointError: a file of the model folder cannot be used.
        """
        config = ConfigFile.read(settings.model_path / CONFIG_FILE)
        return cls(
            model_id=settings.model_id,
            model_type=config.text("model_type", ""),
            architectures=config.texts("architectures"),
            pad_token_id=_first(config.integers("pad_token_id")),
            bos_token_id=_first(config.integers("bos_token_id")),
            sampling_defaults=_changed(SamplingDefaults.read(settings.model_path)),
            tokenizer_folders=(settings.tokenizer_folder, settings.model_path),
            max_running=settings.max_running_requests,
            page_size=settings.page_size,
            kv_cache_dtype=settings.kv_cache_dtype.value,
            dtype=settings.dtype.value,
        )


def _first(token_ids: tuple[int, ...]) -> int:
    return token_ids[0] if token_ids else 0


def _changed(defaults: SamplingDefaults) -> str:
    usual = dataclasses.asdict(SamplingDefaults())
    own = dataclasses.asdict(defaults)
    changed = {name: value for name, value in own.items() if value != usual[name]}
    return json.dumps(changed) if changed else ""
