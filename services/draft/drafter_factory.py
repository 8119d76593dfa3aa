"""Builds the drafter that the settings name; reads its properties from configs and tokenizers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.draft.algorithm import Algorithm
from services.draft.drafters.drafter import Drafter, DrafterLimits
from services.draft.drafters.ngram import NgramDrafter
from services.draft.events import WorkerIdentity
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.hub import shown_name
from shared.model_files import tokenizer_sha256
from shared.vocabulary_map import VocabularyMap, read_vocabulary_map

if TYPE_CHECKING:
    from services.draft.drafters.model_factory import Host
    from services.followers import Followers

Encode = Callable[[str], list[int]]


def read_corpus(path: Path, encode: Encode | None) -> Iterator[list[int]]:
    """Yields the token ids of each text: a `.txt` file is one text, a `.jsonl` file has one text a
    line, either a JSON string or a list of token ids.

    Args:
        encode: the tokenizer; None when there is none.

    Raises:
        SettingsError: the file is missing or malformed, or has text without a tokenizer to encode
            it; names the line.
    """
    is_lines = path.suffix == ".jsonl"
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _problem(str(error)) from error
    for number, text in enumerate(content.splitlines() if is_lines else [content], 1):
        place = f"{path}:{number}" if is_lines else str(path)
        if is_lines and not text.strip():
            continue
        try:
            value = json.loads(text) if is_lines else text
        except ValueError as error:
            raise _problem(f"{place}: {error}") from error
        if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
            yield value
        elif not isinstance(value, str):
            raise _problem(f"{place}: neither a string nor a list of token ids")
        elif encode is None:
            raise _problem(f"{place} holds text; name its tokenizer with --tokenizer")
        else:
            yield encode(value)


def load_encode(folder: Path) -> Encode:
    """Returns a function that tokenizes a text without special tokens.

    Raises:
        SettingsError: the folder has no `tokenizer.json`.
    """
    from tokenizers import Tokenizer  # only where a corpus is read

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _problem(f"{folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _problem(message: str) -> SettingsError:
    return SettingsError((f"--speculative-ngram-corpus-path: {message}",))


log = logging.getLogger(__name__)


def build_drafter(
    settings: DraftSettings, host: Host | None = None, followers: Followers | None = None
) -> Drafter:
    """Builds the drafter with its weights or corpus loaded.

    Args:
        host: the target of this process, if there is one.
        followers: the other processes of a sharded model.

    Raises:
        CheckpointError: the model folder cannot be served.
        SettingsError: memory does not hold what the settings ask for, or the corpus is unreadable.
    """
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return _build_ngram(settings)
    from services.draft.drafters.model_factory import Host, build_model_drafter
    from shared.runtime.memory import CacheTooSmall, refusing_shortage

    host = host or Host()
    try:
        with refusing_shortage(host.no_memory):
            return build_model_drafter(settings, host, followers)
    except CacheTooSmall as error:
        if host.cache is None:
            raise
        # The target reserved its memory first, so its settings are the ones to lower.
        raise SettingsError((host.no_memory(error.shortage),)) from error


def use_device(settings: DraftSettings) -> None:
    """Makes the drafter's device the one that the calling thread launches kernels on."""
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return
    from shared.runtime.device import device_named, launch_on

    launch_on(device_named(settings.device))


def compiles_kernels(settings: DraftSettings) -> bool:
    """Whether the drafter's kernels are compiled on first use."""
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return False
    from shared.runtime.device import device_named

    return device_named(settings.device).type == "cuda"


OUTCOME_BUDGET = 8
"""Verdicts of a sequence that a language model on a GPU prepares for, with a target elsewhere."""


def outcome_budget(settings: DraftSettings) -> int:
    """Returns for how many verdicts of a sequence trees are prepared to be pushed.

    With a target on this host, a language model takes part in the target's rounds, which draft
    ahead by themselves.
    """
    if settings.speculative_outcome_budget is not None:
        return settings.speculative_outcome_budget
    is_model = settings.algorithm is Algorithm.STANDALONE
    is_ahead = is_model and settings.has_distant_target and compiles_kernels(settings)
    return OUTCOME_BUDGET if is_ahead else 0


def worker_identity(
    settings: DraftSettings, limits: DrafterLimits, *, worker_id: str
) -> WorkerIdentity:
    """Returns the worker's identity for the handshake.

    Raises:
        CheckpointError: the folder holds no tokenizer.
    """
    identity = WorkerIdentity(
        worker_id=worker_id,
        model_id=model_id(settings),
        algorithm=settings.algorithm.value,
        tokenizer_sha256=tokenizer_identity(settings),
        max_sequences=settings.max_running_requests,
        max_context_tokens=limits.max_context_tokens,
        feature_spec=limits.feature_spec,
        # Who sets an outcome budget wants pushed trees, so the head takes part in no rounds.
        mapped_head=None if settings.speculative_outcome_budget else limits.mapped_head,
        shape=settings.shape,
    )
    shares_memory = identity.feature_spec is not None or identity.mapped_head is not None
    return _sharing(identity, settings) if shares_memory else identity


def _sharing(identity: WorkerIdentity, settings: DraftSettings) -> WorkerIdentity:
    """Adds the host and device that a target needs to share memory with the draft."""
    from shared.runtime.device import device_id, device_named
    from shared.runtime.ring_memory import host_id

    device = device_named(settings.device)
    return replace(
        identity,
        host_id=host_id(),
        device=str(device),
        device_id=device_id(device),
        is_shape_pinned=settings.is_shape_pinned,
    )


def model_id(settings: DraftSettings) -> str:
    """Returns the name shown to targets and operators."""
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return "ngram"
    return shown_name(settings.model_folder)


def tokenizer_identity(settings: DraftSettings) -> str | None:
    """Returns the hash that targets compare; None for a drafter that fits any tokenizer.

    Raises:
        CheckpointError: the folder holds no tokenizer.
    """
    if settings.tokenizer is not None:
        return tokenizer_sha256(settings.tokenizer)
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return None
    # A head uses its target's tokens; a model uses those of the target's tokenizer, if it is named.
    if settings.algorithm.reads_features:
        return tokenizer_sha256(settings.target_folder)
    return tokenizer_sha256(settings.target_tokenizer or settings.model_folder)


def _build_ngram(settings: DraftSettings) -> NgramDrafter:
    drafter = NgramDrafter(settings.ngram_options)
    path = settings.speculative_ngram_corpus_path
    if path is not None:
        encode = None if settings.tokenizer is None else load_encode(settings.tokenizer)
        num_tokens = 0
        for token_ids in read_corpus(path, encode):
            drafter.learn(token_ids)
            num_tokens += len(token_ids)
        log.info("corpus %s: %s tokens", path, f"{num_tokens:,}")
    return drafter


def feature_layers(settings: DraftSettings) -> tuple[int, ...]:
    """Returns the target layers whose features a head reads, as `FeatureSpec.layer_indices` counts
    them; empty for other drafters.

    Raises:
        CheckpointError: a config is missing or cannot be served.
    """
    if not settings.algorithm.reads_features:
        return ()
    # A worker without a model runs where torch is not installed.
    from shared.models.config import ModelConfig

    target = ModelConfig.from_folder(settings.target_folder)
    if settings.algorithm is Algorithm.MTP:
        return (target.mtp_feature_layer,)
    if settings.algorithm is Algorithm.DFLASH:
        from shared.models.heads.dflash import DflashConfig

        return DflashConfig.from_folder(settings.model_folder, target).feature_layers
    from shared.models.heads.config import HeadConfig, HeadKind

    kind = HeadKind(settings.algorithm.value)
    return HeadConfig.from_folder(settings.model_folder, kind, target).feature_layers


def check_no_states(settings: DraftSettings) -> None:
    """Raises: CheckpointError if the draft is a model with linear attention, or the folder has no
    config that can be served."""
    if settings.algorithm is not Algorithm.STANDALONE:
        return
    # A worker without a model runs where torch is not installed.
    from shared.models.config import ModelConfig

    config = ModelConfig.from_folder(settings.model_folder)
    if config.delta is not None:
        raise CheckpointError(
            f"{settings.model_folder}: {config.architecture} has linear attention; it is not "
            f"supported as a draft model (--speculative-algorithm {settings.algorithm.value})"
        )


def target_vocabulary(settings: DraftSettings) -> VocabularyMap | None:
    """Returns the map from the draft's tokens to its target's; None where they are the same, or the
    settings do not name another tokenizer.

    Raises:
        CheckpointError: see `read_vocabulary_map`.
    """
    target = settings.target_tokenizer
    if settings.algorithm is not Algorithm.STANDALONE or target is None:
        return None
    return read_vocabulary_map(settings.model_folder, target)
