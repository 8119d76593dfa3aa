"""Settings of a learner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.draft.settings_problems import DEMO_TARGET, default_model_folder
from shared.errors import raise_problems
from shared.model_options import DTYPE_SYNONYMS, Dtype, device_problems
from shared.settings import DialingSettings, address_problems, setting

TAUGHT = (Algorithm.EAGLE, Algorithm.EAGLE3, Algorithm.MTP, Algorithm.STANDALONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings(DialingSettings):
    """Trains running drafts on the answers of their target."""

    target: tuple[str, ...] = setting(
        (), "HOST:PORT of a target to learn from, or unix:PATH; repeat for several"
    )
    traffic: tuple[Path, ...] = setting(
        (),
        "archive of tokens to learn from, by --record or the trainer; repeat for several",
    )
    replay: tuple[Path, ...] = setting(
        (), "archive of tokens that is only replayed, against forgetting; repeat for several"
    )
    record: Path | None = setting(
        None,
        "archive (.npz) of the kept tokens, written at the end, for --traffic and the trainer",
    )
    publish_to: tuple[str, ...] = setting(
        (),
        "HOST:PORT of AdminService of a draft, or of a target that embeds one, to swap weights "
        "into; repeat for several",
    )
    speculative_algorithm: Algorithm = setting(
        Algorithm.EAGLE3,
        "algorithm of the draft",
        aliases=("speculative-algo", "algorithm"),
        choices=tuple(algorithm.value for algorithm in TAUGHT),
    )
    speculative_draft_model_path: Path | None = setting(
        None,
        "folder of the draft as it is served, a head's written by services.draft.training; the "
        "demo's when unset",
        is_model=True,
    )
    target_model_path: Path | None = setting(
        None, "folder of the target; the demo's when unset", is_model=True
    )
    out: Path = setting(Path(".learner"), "folder for the versions of the draft, and the log")
    versions_kept: int = setting(4, "versions kept in --out", minimum=2)
    retain_tokens: int = setting(
        200_000, "most tokens kept in memory, with their hidden states", minimum=1000
    )
    retain_s: float | None = setting(
        None, "longest time a sequence is kept; as long as there is room when unset", minimum=1.0
    )
    held_out_share: float = setting(
        0.1, "share of the traffic to measure on, never trained on", minimum=0.01, maximum=0.5
    )
    replay_share: float = setting(
        0.25, "share of each batch from older traffic and --replay", minimum=0.0, maximum=0.9
    )
    busy_share: float = setting(
        1.0, "share of the time spent on training", minimum=0.01, maximum=1.0
    )
    lesson_updates: int = setting(100, "updates of the weights between measurements", minimum=1)
    lesson_tokens: int = setting(2000, "new tokens before the next lesson begins", minimum=1)
    max_lessons: int | None = setting(None, "exit after this many lessons", minimum=1)
    min_gain: float = setting(
        0.02, "tokens a round that new weights must gain on held-out traffic", minimum=0.0
    )
    max_loss: float = setting(
        0.05, "tokens a round that swapped weights may lose before they are taken back", minimum=0.0
    )
    rate: float | None = setting(
        None,
        "highest learning rate; 0.25 over the hidden size when unset, 0.1 for STANDALONE",
        minimum=0.0,
    )
    batch_size: int = setting(16, "sequences of an update", minimum=1)
    window: int = setting(512, "most tokens of a sequence that are learnt from", minimum=16)
    unroll: int = setting(4, "tokens drafted from the head's own states in training", minimum=1)
    dtype: Dtype = setting(
        Dtype.AUTO,
        "element type of the drafts, so that one set of features serves all; auto: the "
        "checkpoint's on a GPU, float32 on a CPU",
        synonyms=DTYPE_SYNONYMS,
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    num_threads: int = setting(1, "CPU threads", minimum=1)
    maintenance_host: str = setting("127.0.0.1", "address of the metrics")
    metrics_port: int | None = setting(
        None, "port of Prometheus metrics; none when unset", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        problems = [
            *address_problems("--target", self.target),
            *address_problems("--publish-to", self.publish_to),
            *device_problems(self.device),
        ]
        if not self.target and not self.traffic:
            problems.append("--target, --traffic: name something to learn from")
        if self.record is not None and self.record.suffix != ".npz":
            problems.append(f"--record is {self.record}; its name must end in .npz")
        if not self.target and self.max_lessons is None:
            problems.append("--max-lessons: recorded traffic alone would be gone over for ever")
        is_demo = self.target_folder.resolve() == DEMO_TARGET.resolve()
        if self.speculative_draft_model_path is None and not is_demo:
            problems.append("--speculative-draft-model-path: name the draft; only the demo has one")
        raise_problems(problems)

    @property
    def target_folder(self) -> Path:
        return self.target_model_path or DEMO_TARGET

    @property
    def model_folder(self) -> Path:
        return self.speculative_draft_model_path or default_model_folder(
            self.speculative_algorithm, self.target_folder
        )
