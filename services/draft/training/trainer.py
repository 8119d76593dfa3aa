"""The training loop: read windows, run the target, step the head, save checkpoints, log. Optimisers
and their learning rate."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported before any process group exists: default arguments of this module's functions keep the
# group that exists at the first import, which optimisers cause. A kept group has threads that
# outlive `destroy_process_group` and can abort the interpreter's exit.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm  # type: ignore[import-untyped]

from services.draft.training.documents import Windows
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.heads import save_head
from services.draft.training.objectives import Objective, Outcome
from shared.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LogRow:
    """Means over the steps since the last row.

    Attributes:
        tokens: read by all processes since the beginning.
        seconds: since the beginning, without interruptions.
        losses, agreements: by drafted position, see `Outcome`.
    """

    step: int
    tokens: int
    seconds: float
    rate_factor: float
    loss: float
    losses: tuple[float, ...]
    agreements: tuple[float, ...]
    accepted_length: float


class TrainingLog:
    """Appends rows to a file, from which rows after `resume_step` are dropped first."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_log(path) if row.step <= resume_step] if path.exists() else []
        path.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        self._path = path

    def write(self, row: LogRow) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))


def read_log(path: Path) -> list[LogRow]:
    """Raises: CheckpointError if the file cannot be read as a log."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        names = ("losses", "agreements")
        return [LogRow(**row | {name: tuple(row[name]) for name in names}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no training log: {error}") from error


def _line(row: LogRow) -> str:
    return json.dumps({key: _rounded(value) for key, value in asdict(row).items()}) + "\n"


def _rounded(value: float | Sequence[float]) -> float | list[float]:
    if isinstance(value, Sequence):
        return [round(item, 5) for item in value]
    return round(value, 5)


def draw_curves(rows: Sequence[LogRow], folder: Path, title: str) -> list[Path]:
    """Writes `loss.png`, and `acceptance.png` with accepted length and agreement by position;
    returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    millions = [row.tokens / 1e6 for row in rows]
    paths = [folder / "loss.png", folder / "acceptance.png"]
    figures = [Figure(figsize=(6, 4), layout="constrained") for _ in paths]
    left, right = (figure.add_subplot() for figure in figures)
    left.plot(millions, [row.loss for row in rows], color="black", label="weighted mean")
    right.plot(
        millions, [row.accepted_length for row in rows], color="black", label="accepted length"
    )
    agreement = right.twinx()
    for position in range(len(rows[0].losses) if rows else 0):
        for axes, values in (
            (left, [row.losses[position] for row in rows]),
            (agreement, [row.agreements[position] for row in rows]),
        ):
            axes.plot(millions, values, label=f"position {position + 1}", linewidth=0.8, alpha=0.7)
    left.set(title=title, xlabel="million tokens", ylabel="loss", yscale="log")
    right.set(title=title, xlabel="million tokens", ylabel="accepted length with bonus")
    agreement.set(ylabel="agreement with the target, by position", ylim=(0, 1))
    left.legend(fontsize="small")
    agreement.legend(fontsize="small", loc="lower right")
    for figure, path in zip(figures, paths, strict=True):
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=100)
    return paths


_MAX_NORM = 1.0
"""Most of the norm of all gradients together; larger ones are clipped."""


class OptimiserKind(enum.Enum):
    """MUON optimises the matrices of the layers; norms, biases and lm_head have AdamW."""

    ADAMW = "adamw"
    MUON = "muon"


class Optimisers:
    """One or two optimisers that step together.

    Args:
        rate: highest learning rate.
        decay: weight decay of matrices.
    """

    def __init__(self, head: nn.Module, kind: OptimiserKind, *, rate: float, decay: float) -> None:
        named = list(head.named_parameters())
        self._parameters = [p for _, p in named]
        matrices = [p for name, p in named if p.dim() == 2 and "lm_head" not in name]
        scores = [p for name, p in named if p.dim() == 2 and "lm_head" in name]
        vectors = [p for _, p in named if p.dim() != 2]
        groups: list[dict[str, Any]] = [
            {"params": scores, "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._all: list[Optimizer] = []
        if kind is OptimiserKind.MUON:
            muon = Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self._all.append(muon)
        else:
            groups.append({"params": matrices, "weight_decay": decay})
        used = [group for group in groups if group["params"]]
        self._all.append(AdamW(used, lr=rate, betas=(0.9, 0.95)))
        self._rate = rate

    def step(self, factor: float) -> None:
        """Clips the gradients, updates at `factor` times the highest rate, clears the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        for optimiser in self._all:
            for group in optimiser.param_groups:
                group["lr"] = self._rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self._all]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        for optimiser, state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(progress: float, *, warm_up: float = 0.02, cool_down: float = 0.5) -> float:
    """Returns the factor of the highest rate at `progress` in [0, 1]: up, level, then down to 0.

    Args:
        warm_up, cool_down: shares of the run.
    """
    if progress < warm_up:
        return max(progress, 1e-3) / warm_up
    return min(1.0, max(0.0, (1.0 - progress) / cool_down))


STATE_FILE = "state.pt"
LOG_FILE = "train.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Length, batch size and checkpoints of a training run.

    Attributes:
        out: folder of the head; state and log are in `out/training`.
        num_steps: updates of the weights, after which the learning rate is 0.
        seconds: time limit, to which the learning rate is adapted; None is no limit.
        batch_size: windows per process and step.
        log_every, save_every: in steps.
    """

    out: Path
    num_steps: int
    seconds: float | None
    batch_size: int
    log_every: int
    save_every: int
    seed: int

    @property
    def folder(self) -> Path:
        return self.out / "training"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, and the number of processes.

    Attributes:
        rank: 0 writes logs and checkpoints.
        size: number of processes.
        device: of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def longest(self, seconds: float) -> float:
        """Returns the largest value of all processes, so that they all stop together."""
        if self.size == 1:
            return seconds
        value = torch.tensor(seconds, device=self.device, dtype=torch.float32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Joins the processes of `torchrun`; without it this process is the only one.

    Args:
        device: `cuda` is one GPU per process, by its rank on the host.
    """
    if not dist.is_torchelastic_launched():
        yield Ranks(rank=0, size=1, device=device)
        return
    is_cuda = device.type == "cuda"
    if is_cuda:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()


class Trainer:
    """One run, from the beginning or from its last checkpoint."""

    def __init__(
        self,
        plan: TrainingPlan,
        objective: Objective[Any],
        target: FrozenTarget,
        windows: Windows,
        optimisers: Optimisers,
        ranks: Ranks,
    ) -> None:
        self._plan, self._objective, self._target = plan, objective, target
        self._windows, self._optimisers, self._ranks = windows, optimisers, ranks
        self._step, self._tokens, self._seconds = 0, 0, 0.0

    @property
    def step(self) -> int:
        return self._step

    def resume(self) -> None:
        """Continues from the last checkpoint of `plan.out`.

        Raises:
            CheckpointError: there is no checkpoint, or it is of another head.
        """
        path = self._plan.folder / STATE_FILE
        try:
            state = torch.load(path, map_location=self._ranks.device, weights_only=True)
            self._objective.head.load_state_dict(state["head"])
            self._optimisers.restore(state["optimisers"])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
        self._step, self._tokens = state["step"], state["tokens"]
        self._seconds = state["seconds"]

    def run(self) -> None:
        """Trains to the end of the plan and writes the head."""
        plan, ranks = self._plan, self._ranks
        model: nn.Module = self._objective
        if ranks.size > 1:
            devices = [ranks.device] if ranks.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=devices)
        log = None
        if ranks.is_first:
            log = TrainingLog(plan.folder / LOG_FILE, resume_step=self._step)
        means = _Means()
        begin = time.monotonic() - self._seconds
        # `disable=None` draws the bar on terminals only.
        is_off = None if ranks.is_first else True
        bar = tqdm(total=plan.num_steps, initial=self._step, disable=is_off)
        while (progress := self._progress()) < 1.0:
            torch.manual_seed(hash((plan.seed, self._step, ranks.rank)))
            factor = rate_factor(progress)
            means.add(self._update(model, factor))
            self._seconds = ranks.longest(time.monotonic() - begin)
            bar.update(1)
            if log and self._step % plan.log_every == 0:
                row = means.row(self._step, self._tokens, self._seconds, factor)
                log.write(row)
                bar.set_postfix(loss=f"{row.loss:.3f}", accepted=f"{row.accepted_length:.2f}")
            if self._step % plan.save_every == 0:
                self.save()
        bar.close()
        self.save()

    def save(self) -> None:
        """Writes the head, and the state for `resume`. Only the first process writes."""
        if not self._ranks.is_first:
            return
        save_head(self._objective.head, self._plan.out)
        state: dict[str, Any] = {
            "head": self._objective.head.state_dict(),
            "optimisers": self._optimisers.state(),
            "step": self._step,
            "tokens": self._tokens,
            "seconds": self._seconds,
        }
        path = self._plan.folder / STATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is killed while it writes must not lose the previous checkpoint.
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def _progress(self) -> float:
        plan = self._plan
        by_time = self._seconds / plan.seconds if plan.seconds else 0.0
        return max(self._step / plan.num_steps, by_time)

    def _update(self, model: nn.Module, factor: float) -> Outcome:
        plan, device = self._plan, self._ranks.device
        batch = self._windows.batch(self._step, size=plan.batch_size, rank=self._ranks.rank)
        token_ids = torch.from_numpy(batch).to(device, non_blocking=True)
        rows = self._target.read(token_ids, self._objective.head.shape.feature_layers)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outcome: Outcome = model(rows)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        self._optimisers.step(factor)
        self._step += 1
        self._tokens += batch.size * self._ranks.size
        return outcome


class _Means:
    """Sums of outcomes on the device; only `row` waits for the device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, outcome: Outcome) -> None:
        parts = (outcome.loss.detach(), outcome.accepted_length)
        scalars = torch.stack(parts).float()
        values = torch.cat((scalars, outcome.losses.float(), outcome.agreements))
        self._sum = values if self._sum is None else self._sum + values
        self._count += 1

    def row(self, step: int, tokens: int, seconds: float, factor: float) -> LogRow:
        """Returns the means and resets."""
        assert self._sum is not None
        loss, accepted, *positions = (self._sum / self._count).tolist()
        half = len(positions) // 2
        self._sum, self._count = None, 0
        return LogRow(
            step=step,
            tokens=tokens,
            seconds=seconds,
            rate_factor=factor,
            loss=loss,
            losses=tuple(positions[:half]),
            agreements=tuple(positions[half:]),
            accepted_length=accepted,
        )
