"""A draft model that is taught what a target's answers were."""

from __future__ import annotations

import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from services.draft.learner.traffic import Example
from services.draft.training.heads import TargetEnds
from services.draft.training.optimisers import OptimiserKind, Optimisers
from shared.models.scaled_weights import QUANTIZATION_CONFIG

State = dict[str, Tensor]
CONFIG_FILE = "config.json"
LIKELY, SURE = 0.67, 1.15
"""Standard deviations above zero: chance alone exceeds them in one measurement of 4, of 8."""
_ROWS_AT_ONCE = 2048
"""Of an update or a measurement; each has scores of the whole vocabulary, an update's at every
step."""
_MEAN_UPDATES = 300
"""The mean of weights reaches back so far; at first, a tenth of the updates there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """Hyperparameters of lessons.

    Attributes:
        unroll: tokens that a head drafts from its own states in training.
        decay: weight of each later one, see `LossTerms`.
        hard: see `LossTerms`.
        rate: highest learning rate; None takes less the wider the model is.
        warm_up: updates until then: the first steps of AdamW know no scale of the gradients, and
            cost a trained head more than a lesson brings.
        batch_size: windows of an update.
        window: most tokens of one.
    """

    unroll: int = 4
    decay: float = 0.8
    hard: float = 0.1
    rate: float | None = None
    warm_up: int = 20
    batch_size: int = 8
    window: int = 512


@dataclass(frozen=True, slots=True)
class Measurement:
    """Accepted lengths of a draft on some examples.

    Attributes:
        walked: rounds and tokens of each, the bonus included.
    """

    walked: tuple[tuple[int, int], ...]

    @property
    def mean_length(self) -> float:
        """Tokens a round."""
        rounds, tokens = map(sum, zip(*self.walked, strict=True)) if self.walked else (0, 0)
        return tokens / max(rounds, 1)

    def beats(self, other: Measurement, gain: float, deviations: float = SURE) -> bool:
        """Whether it gains so much more on the same examples, and not by their luck: the rounds
        that it saves lie so many standard deviations above none."""
        saved = [theirs[0] - own[0] for own, theirs in zip(self.walked, other.walked, strict=True)]
        mean = sum(saved) / max(len(saved), 1)
        spread = math.sqrt(sum((each - mean) ** 2 for each in saved))
        is_sure = sum(saved) >= deviations * spread
        return self.mean_length >= other.mean_length + gain and is_sure


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows, padded behind their ends.

    Attributes:
        token_ids: `[B, R + 1]` int64.
        rows: `[B, R, W]`.
        firsts: `[B]` int64, the first token that is scored.
        lengths: `[B]` int64, tokens.
    """

    token_ids: Tensor
    rows: Tensor
    firsts: Tensor
    lengths: Tensor

    @property
    def num_scored(self) -> Tensor:
        """Tokens that a draft of one step is asked for, `[]`."""
        return (self.lengths - self.firsts.clamp(min=2)).clamp(min=0).sum()


class Student(ABC):
    """Weights that learn, beside those that serve. Used by one thread.

    Args:
        module: what learns; its device is that of `ends`.
        rate: learning rate where `teaching` names none.
        optimiser: of its matrices.

    Attributes:
        folder: that the weights came from.
        feature_layers: of the target, whose states are the rows of examples, see `HeadShape`.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        ends: TargetEnds,
        teaching: Teaching,
        *,
        rate: float,
        optimiser: OptimiserKind,
    ) -> None:
        self.folder, self._optimiser = folder, optimiser
        self._module, self._ends, self._teaching = module, ends, teaching
        self._rate = rate if teaching.rate is None else teaching.rate
        self._device = ends.embedding.device
        self._mean = self._copied()
        self._optimisers = self._new_optimisers()

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def projection(self) -> Tensor | None:
        """`[W, K * H]`, what the target makes of the layers side by side; None where they are read
        as they are."""
        return None

    @property
    def batch_size(self) -> int:
        """Examples of an update."""
        return self._teaching.batch_size

    def state(self) -> State:
        """Returns a copy, on the host, of the weights that it has come to: the mean of the latest,
        which is steadier than the last where the learning rate never falls."""
        return _on_host(self._mean)

    def restore(self, state: State) -> None:
        """Goes on from a copy of weights, with no memory of gradients."""
        self._module.load_state_dict(state)
        self._mean = self._copied()
        self._optimisers = self._new_optimisers()

    @contextmanager
    def as_it_was(self, state: State) -> Iterator[None]:
        """Has other weights for as long as the block runs."""
        own = _on_host(self._module.state_dict())
        self._module.load_state_dict(state)
        try:
            yield
        finally:
            self._module.load_state_dict(own)

    def learn(self, examples: Sequence[Example], generator: torch.Generator) -> float:
        """Makes one update on a window of each example; returns the loss."""
        starts = self._at_random(examples, generator)
        batches = [self._batch(examples[part], starts[part]) for part in self._parts(examples)]
        counts = torch.stack([batch.num_scored for batch in batches])
        shares = counts / counts.sum().clamp(min=1)
        mean = torch.zeros((), device=self._device)
        for batch, share in zip(batches, shares, strict=True):
            with self._autocast():
                loss = self._loss(batch) * share
            loss.backward()
            mean += loss.detach()
        self._num_updates += 1
        self._optimisers.step(min(self._num_updates / self._teaching.warm_up, 1.0))
        newest = max(1.0 / _MEAN_UPDATES, 10.0 / (10.0 + self._num_updates))
        for name, value in self._module.state_dict().items():
            if value.is_floating_point():
                self._mean[name].lerp_(value, newest)
        return float(mean)

    @torch.no_grad()
    def measured(self, examples: Sequence[Example], *, num_steps: int) -> Measurement:
        """Walks greedy chains along what the target said: what a draft in service would have
        gained at temperature 0."""
        lengths = self._lengths(examples)
        starts = [len(each.token_ids) - n for each, n in zip(examples, lengths, strict=True)]
        walked: dict[int, tuple[int, int]] = {}
        # Of like lengths, so that little of a batch is padding.
        by_length = sorted(range(len(examples)), key=lengths.__getitem__, reverse=True)
        while by_length:
            size = max(_ROWS_AT_ONCE // lengths[by_length[0]], 1)
            part, by_length = by_length[:size], by_length[size:]
            batch = self._batch([examples[each] for each in part], [starts[each] for each in part])
            with self._autocast():
                depths = self._depths(batch, num_steps).tolist()
            for each, own in zip(part, depths, strict=True):
                first = examples[each].num_prompt_tokens - starts[each]
                walked[each] = _walked(own, max(first + 1, 2), lengths[each])
        return Measurement(tuple(walked[each] for each in range(len(examples))))

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the weights as the folder that they came from is written, rounded to the type that
        its config names."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor: ...

    @abstractmethod
    def _depths(self, batch: Batch, num_steps: int) -> Tensor:
        """Returns `[B, R]` int64; element i is how many tokens of a greedy chain behind token i + 1
        are those of the text, or of the padding behind it."""

    def _write_config(self, folder: Path) -> torch.dtype:
        """Writes the config of plain weights; returns their type."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((self.folder / CONFIG_FILE).read_text())
        config.pop(QUANTIZATION_CONFIG, None)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def _lm_head(self) -> Tensor:
        """In the type that it is multiplied in: of its own where products cast."""
        lm_head = self._ends.lm_head
        return lm_head if self._device.type == "cuda" else lm_head.float()

    def _copied(self) -> State:
        """Tensors that are one in the module are several here."""
        return {name: value.clone() for name, value in self._module.state_dict().items()}

    def _lengths(self, examples: Sequence[Example]) -> list[int]:
        """Returns the tokens of each one's window."""
        return [min(len(each.token_ids), self._teaching.window) for each in examples]

    def _parts(self, examples: Sequence[Example]) -> Iterator[slice]:
        """Cuts an update, so that its memory does not grow with its size."""
        lengths, start = self._lengths(examples), 0
        for end in range(1, len(examples) + 1):
            is_last = end == len(examples)
            if is_last or max(lengths[start : end + 1]) * (end + 1 - start) > _ROWS_AT_ONCE:
                yield slice(start, end)
                start = end

    def _at_random(self, examples: Sequence[Example], generator: torch.Generator) -> list[int]:
        """Returns where a window of each begins, anywhere in those that are longer."""
        rooms = [max(len(each.token_ids) - self._teaching.window, 0) for each in examples]
        draws = (torch.randint(room + 1, (), generator=generator) if room else 0 for room in rooms)
        return list(map(int, draws))

    def _batch(self, examples: Sequence[Example], starts: Sequence[int]) -> Batch:
        """Cuts a window of each example."""
        longest = max(self._lengths(examples))
        width = examples[0].rows.shape[1]
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        rows = torch.zeros(len(examples), longest - 1, width)
        firsts, lengths = [], []
        for index, (each, start) in enumerate(zip(examples, starts, strict=True)):
            part = each.token_ids[start : start + longest]
            tokens[index, : len(part)] = torch.tensor(part)
            rows[index, : len(part) - 1] = each.rows[start : start + len(part) - 1].float()
            firsts.append(max(each.num_prompt_tokens - start, 0))
            lengths.append(len(part))
        moved = (tokens, rows, torch.tensor(firsts), torch.tensor(lengths))
        return Batch(*(each.to(self._device) for each in moved))

    def _new_optimisers(self) -> Optimisers:
        self._num_updates = 0
        return Optimisers(self._module, self._optimiser, rate=self._rate, decay=0.0)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        is_on = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_on)


def _on_host(state: State) -> State:
    """Returns copies, which take nothing of a GPU that others need."""
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


def _walked(depths: Sequence[int], at: int, end: int) -> tuple[int, int]:
    """Returns the rounds from token `at` to `end`, and the tokens that they gain, the bonus
    included; element i of `depths` is that of a chain behind token i + 1."""
    num_rounds = num_tokens = 0
    while at < end:
        gained = depths[at - 2] + 1
        num_rounds, num_tokens = num_rounds + 1, num_tokens + min(gained, end - at)
        at += gained
    return num_rounds, num_tokens
