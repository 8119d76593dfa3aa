"""Builds the drafter that the settings name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from services.draft.algorithm import Algorithm
from services.draft.corpus import load_encode, read_corpus
from services.draft.drafters.drafter import Drafter, DrafterLimits
from services.draft.drafters.ngram import NgramDrafter
from services.draft.settings import DraftSettings
from services.draft.worker import WorkerIdentity
from shared.errors import SettingsError
from shared.hub import shown_name
from shared.tokenizer_files import tokenizer_sha256

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from services.draft.drafters.host import Host
    from services.followers import Followers

log = logging.getLogger(__name__)


def build_drafter(
    settings: DraftSettings, host: Host | None = None, followers: Followers | None = None
) -> Drafter:
    """Loads weights or corpus.

    Args:
        host: the target of this process, if there is one.
        followers: the other processes of a model that is cut.

    Raises:
        CheckpointError: the model folder cannot be served.
        SettingsError: memory does not hold what the settings ask for, or the corpus is unreadable.
    """
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return _build_ngram(settings)
    from services.draft.drafters.host import Host
    from shared.runtime.memory import CacheTooSmall
    from shared.runtime.shortage import refusing_shortage

    host = host or Host()
    try:
        with refusing_shortage(host.no_memory):
            return _build_model_drafter(settings, host, followers)
    except CacheTooSmall as error:
        if host.cache is None:
            raise
        # The target has taken its share first, so that is the one to lower.
        raise SettingsError((host.no_memory(error.shortage),)) from error


def _build_model_drafter(
    settings: DraftSettings, host: Host, followers: Followers | None
) -> Drafter:
    if settings.algorithm is Algorithm.MTP:
        from services.draft.drafters.mtp_factory import build_mtp

        return build_mtp(settings, host)
    if settings.algorithm is Algorithm.DFLASH:
        from services.draft.drafters.dflash_factory import build_dflash

        return build_dflash(settings, host)
    if settings.algorithm.reads_features:
        from services.draft.drafters.eagle_factory import build_eagle

        return build_eagle(settings, host)
    from services.draft.drafters.standalone_factory import build_standalone

    return build_standalone(settings, followers)


def use_device(settings: DraftSettings) -> None:
    """Lets the calling thread run the drafter that was built from `settings`."""
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return
    from shared.runtime.device import device_named, launch_on

    launch_on(device_named(settings.device))


def compiles_kernels(settings: DraftSettings) -> bool:
    """Whether the drafter that was built from `settings` computes by kernels that are compiled on
    first use."""
    if settings.speculative_algorithm is Algorithm.NGRAM:
        return False
    from shared.runtime.device import device_named

    return device_named(settings.device).type == "cuda"


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
        shape=settings.shape,
    )
    return identity if limits.feature_spec is None else _sharing(identity, settings)


def _sharing(identity: WorkerIdentity, settings: DraftSettings) -> WorkerIdentity:
    """Adds what a target on the same host needs to share memory."""
    from shared.runtime.device import device_named
    from shared.runtime.ring_memory import host_id

    return replace(identity, host_id=host_id(), device=str(device_named(settings.device)))


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
    # A head speaks the tokens of its target.
    is_head = settings.algorithm.reads_features
    return tokenizer_sha256(settings.target_folder if is_head else settings.model_folder)


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
