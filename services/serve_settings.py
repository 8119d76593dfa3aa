"""Settings of `outrider serve` itself; every other flag belongs to a service."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.sglang_settings import SglangSettings
from services.stack import StackTimeouts
from shared.errors import SettingsError
from shared.settings import setting

NO_DRAFT = "NONE"


class Placement(enum.Enum):
    """Placement of the draft: in a process of its own, or in the target's."""

    AUTO = "auto"
    REMOTE = "remote"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings(SglangSettings):
    """Starts target, drafts and gateway on this host. Accepts the flags of all three services, and
    SGLang's launch lines."""

    speculative_algorithm: tuple[str, ...] = setting(
        (),
        "drafter; several by comma or space start a draft each, NONE decodes plainly; unset: "
        "STANDALONE for the demo or with a draft model, else NGRAM",
        aliases=("speculative-algo", "algorithm"),
        choices=(*(each.value for each in Algorithm), NO_DRAFT),
    )
    placement: Placement = setting(
        Placement.AUTO,
        "remote: the draft is its own process; embedded: it runs in the target's; auto: embedded "
        "for a head on a GPU, or if the target uses every GPU, else remote",
        aliases=("draft",),
    )
    speculative_online_training: bool = setting(
        False,
        "start a learner, which trains the draft's head on the target's answers; set its flags by "
        "variables, OUTRIDER_LEARNER_…",
    )
    certs: Path | None = setting(
        None, "folder that `make certs` wrote: TLS on every connection, mutual between services"
    )
    log_dir: Path = setting(Path(".run"), "folder for one log file per process")
    start_timeout_s: float = setting(
        StackTimeouts().start_s, "time until everything is ready", minimum=0.1
    )
    stop_grace_s: float = setting(
        StackTimeouts().stop_s, "time between SIGTERM and SIGKILL, for each process", minimum=0.1
    )

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.certs is not None and not (self.certs / "ca.pem").is_file():
            problems.append(f"--certs: {self.certs} has no ca.pem; `make certs` writes one")
        count = len(self.algorithms or ())
        if count > 1 and self.placement is Placement.EMBEDDED:
            problems.append(
                f"--placement: a target embeds one draft; --speculative-algorithm names {count}"
            )
        if problems:
            raise SettingsError(tuple(problems))

    @property
    def algorithms(self) -> tuple[str, ...] | None:
        """Drafters to start, each once; None leaves the choice to the models."""
        if not self.speculative_algorithm:
            return None
        return tuple(each for each in dict.fromkeys(self.speculative_algorithm) if each != NO_DRAFT)

    @property
    def timeouts(self) -> StackTimeouts:
        return StackTimeouts(start_s=self.start_timeout_s, stop_s=self.stop_grace_s)
