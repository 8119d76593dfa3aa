"""Builds the draft that a target hosts, from the draft's own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.draft.drafter_factory import build_drafter, worker_identity
from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from services.draft.warm_up import warm_up
from services.embedded import EmbeddedDraft
from services.target.engine import Engine
from services.target.process import attachment_terms
from services.target.settings import TargetSettings
from shared.settings import load_settings, shown_settings

_NOT_EMBEDDED = frozenset(
    {"target", "host", "port", "maintenance-host", "maintenance-port", "num-threads"}
)


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft ready to attach.

    Attributes:
        settings: by flag name, without those of a process of its own.
    """

    port: EmbeddedDraft
    settings: Mapping[str, str]


def embedded_settings(
    settings: TargetSettings, arguments: Sequence[str], env: Mapping[str, str]
) -> DraftSettings:
    """Reads the settings of the draft a target hosts; it shares the target's device and dtype.

    Args:
        arguments: flags that are not the target's own.
        env: `OUTRIDER_DRAFT_*` is read.

    Raises:
        SettingsError: names every bad setting of the draft.
    """
    inherited = [f"--device={settings.device}", f"--dtype={settings.dtype.value}"]
    chosen = load_settings(
        DraftSettings, service="draft", arguments=[*arguments, *inherited], env=env
    )
    if chosen.algorithm.reads_features and chosen.target_model_path is None:
        return replace(chosen, target_model_path=settings.model_path)
    return chosen


def build_embedded_draft(
    target: Engine, settings: TargetSettings, chosen: DraftSettings
) -> BuiltDraft:
    """Loads the drafter and starts its engine.

    Raises:
        CheckpointError: the draft's folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    drafter = build_drafter(chosen)
    engine = DraftEngine(
        drafter,
        chosen.shape,
        chunk_tokens=chosen.chunked_prefill_size,
        max_sequences=chosen.max_running_requests,
    )
    engine.start()
    warm_up(engine, drafter.limits.feature_spec)
    worker = worker_identity(chosen, drafter.limits, worker_id="embedded")
    shown = {k: v for k, v in shown_settings(chosen).items() if k not in _NOT_EMBEDDED}
    return BuiltDraft(EmbeddedDraft(target, engine, worker, attachment_terms(settings)), shown)
