"""A draft model that learns from a target's answers."""

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

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.traffic import Example
from services.draft.training.heads import TargetTables
from services.draft.training.optimisers import OptimiserKind, Optimisers
from shared.models.scaled_weights import QUANTIZATION_CONFIG

State = dict[str, Tensor]
CONFIG_FILE = "config.json"
LIKELY, SURE = 0.67, 1.15
"""Standard deviations above zero. Chance exceeds LIKELY in one of 4 measurements, SURE in one of 8.
"""
_MAX_ROWS = 2048
"""Most rows of a forward. Each row has scores of the whole vocabulary, in an update at every step.
"""
_AVERAGED_UPDATES = 300
"""Updates over which weights are averaged; at first, a tenth of the updates so far."""


HARD, DECAY = 0.1, 0.8
"""See `LossTerms`."""
WARM_UP = 20
"""Updates until the highest rate. AdamW's first steps do not know the scale of the gradients, and
cost a trained head more than a lesson gains."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Accepted lengths of a draft on some examples.

    Attributes:
        walked: number of rounds, and of tokens with bonus tokens, for each example.
    """

    walked: tuple[tuple[int, int], ...]

    @property
    def mean_length(self) -> float:
        """Tokens per round."""
        rounds, tokens = map(sum, zip(*self.walked, strict=True)) if self.walked else (0, 0)
        return tokens / max(rounds, 1)

    def beats(self, other: Measurement, gain: float, deviations: float = SURE) -> bool:
        """Whether this draft gains at least `gain` tokens per round over `other` on the same
        examples, and not by chance: the rounds saved lie `deviations` standard deviations above 0.
        """
        pairs = zip(self.walked, other.walked, strict=True)
        saved = [other_rounds - rounds for (rounds, _), (other_rounds, _) in pairs]
        mean = sum(saved) / max(len(saved), 1)
        spread = math.sqrt(sum((rounds - mean) ** 2 for rounds in saved))
        is_sure = sum(saved) >= deviations * spread
        return self.mean_length >= other.mean_length + gain and is_sure


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows of examples, padded at the end.

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
        """Number of tokens that a draft of one step scores, `[]`."""
        return (self.lengths - self.firsts.clamp(min=2)).clamp(min=0).sum()


class Student(ABC):
    """Weights in training, a copy of the served ones. Used by one thread.

    Args:
        module: the model to train, on the device of `tables`.
        rate: learning rate if `settings` has none.
        optimiser: of the matrices.

    Attributes:
        folder: the folder of the initial weights.
        feature_layers: layers of the target whose states are the rows of examples, see `HeadShape`.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        tables: TargetTables,
        settings: LearnerSettings,
        *,
        rate: float,
        optimiser: OptimiserKind,
    ) -> None:
        self.folder, self._optimiser = folder, optimiser
        self._module, self._tables, self._settings = module, tables, settings
        self._rate = rate if settings.rate is None else settings.rate
        self._device = tables.embedding.device
        self._mean = self._copy_weights()
        self._optimisers = self._new_optimisers()

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def projection(self) -> Tensor | None:
        """`[W, K * H]`, by which the target projects the concatenated layers; None: it does not."""
        return None

    @property
    def batch_size(self) -> int:
        return self._settings.batch_size

    def state(self) -> State:
        """Returns a copy, on the host, of the mean of the latest weights. The mean is less noisy
        than the last weights, because the learning rate never falls."""
        return _on_host(self._mean)

    def restore(self, state: State) -> None:
        """Continues from a copy of weights, with new optimisers."""
        self._module.load_state_dict(state)
        self._mean = self._copy_weights()
        self._optimisers = self._new_optimisers()

    @contextmanager
    def with_weights(self, state: State) -> Iterator[None]:
        """Has the weights `state` inside the block."""
        previous = _on_host(self._module.state_dict())
        self._module.load_state_dict(state)
        try:
            yield
        finally:
            self._module.load_state_dict(previous)

    def learn(self, examples: Sequence[Example], generator: torch.Generator) -> float:
        """Makes one update on a window of each example; returns the loss."""
        starts = self._random_starts(examples, generator)
        batches = [self._batch(examples[part], starts[part]) for part in self._slices(examples)]
        counts = torch.stack([batch.num_scored for batch in batches])
        shares = counts / counts.sum().clamp(min=1)
        mean = torch.zeros((), device=self._device)
        for batch, share in zip(batches, shares, strict=True):
            with self._autocast():
                loss = self._loss(batch) * share
            loss.backward()
            mean += loss.detach()
        self._num_updates += 1
        self._optimisers.step(min(self._num_updates / WARM_UP, 1.0))
        weight = max(1.0 / _AVERAGED_UPDATES, 10.0 / (10.0 + self._num_updates))
        for name, value in self._module.state_dict().items():
            if value.is_floating_point():
                self._mean[name].lerp_(value, weight)
        return float(mean)

    @torch.no_grad()
    def measure(self, examples: Sequence[Example], *, num_steps: int) -> Measurement:
        """Simulates rounds with greedy chains along the target's answers: the gain of a serving
        draft at temperature 0."""
        lengths = self._lengths(examples)
        starts = [len(example.token_ids) - n for example, n in zip(examples, lengths, strict=True)]
        walked: dict[int, tuple[int, int]] = {}
        # Examples of similar lengths share a batch, which saves padding.
        by_length = sorted(range(len(examples)), key=lengths.__getitem__, reverse=True)
        while by_length:
            size = max(_MAX_ROWS // lengths[by_length[0]], 1)
            part, by_length = by_length[:size], by_length[size:]
            batch = self._batch([examples[i] for i in part], [starts[i] for i in part])
            with self._autocast():
                depths = self._depths(batch, num_steps).tolist()
            for index, row in zip(part, depths, strict=True):
                first = examples[index].num_prompt_tokens - starts[index]
                walked[index] = _walk(row, max(first + 1, 2), lengths[index])
        return Measurement(tuple(walked[index] for index in range(len(examples))))

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the mean weights in the format of `self.folder`, in the dtype of its config."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor: ...

    @abstractmethod
    def _depths(self, batch: Batch, num_steps: int) -> Tensor:
        """Returns `[B, R]` int64; element i is the number of leading tokens of the greedy chain
        after token i + 1 that equal the text, or the padding behind it."""

    def _write_config(self, folder: Path) -> torch.dtype:
        """Writes the config without quantization; returns the dtype of the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((self.folder / CONFIG_FILE).read_text())
        config.pop(QUANTIZATION_CONFIG, None)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def _lm_head(self) -> Tensor:
        """The lm_head in the dtype of products: its own on a GPU, where autocast converts."""
        lm_head = self._tables.lm_head
        return lm_head if self._device.type == "cuda" else lm_head.float()

    def _copy_weights(self) -> State:
        """Returns copies of the module's weights; tensors that it shares become separate."""
        return {name: value.clone() for name, value in self._module.state_dict().items()}

    def _lengths(self, examples: Sequence[Example]) -> list[int]:
        return [min(len(example.token_ids), self._settings.window) for example in examples]

    def _slices(self, examples: Sequence[Example]) -> Iterator[slice]:
        """Yields slices of an update of at most `_MAX_ROWS` padded rows, to bound its memory."""
        lengths, start = self._lengths(examples), 0
        for end in range(1, len(examples) + 1):
            is_last = end == len(examples)
            if is_last or max(lengths[start : end + 1]) * (end + 1 - start) > _MAX_ROWS:
                yield slice(start, end)
                start = end

    def _random_starts(self, examples: Sequence[Example], generator: torch.Generator) -> list[int]:
        """Returns the start of each example's window, random in examples longer than a window."""
        rooms = [max(len(example.token_ids) - self._settings.window, 0) for example in examples]
        draws = (torch.randint(room + 1, (), generator=generator) if room else 0 for room in rooms)
        return list(map(int, draws))

    def _batch(self, examples: Sequence[Example], starts: Sequence[int]) -> Batch:
        longest = max(self._lengths(examples))
        width = examples[0].rows.shape[1]
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        rows = torch.zeros(len(examples), longest - 1, width)
        firsts, lengths = [], []
        for index, (example, start) in enumerate(zip(examples, starts, strict=True)):
            part = example.token_ids[start : start + longest]
            tokens[index, : len(part)] = torch.tensor(part)
            rows[index, : len(part) - 1] = example.rows[start : start + len(part) - 1].float()
            firsts.append(max(example.num_prompt_tokens - start, 0))
            lengths.append(len(part))
        columns = (tokens, rows, torch.tensor(firsts), torch.tensor(lengths))
        return Batch(*(column.to(self._device) for column in columns))

    def _new_optimisers(self) -> Optimisers:
        self._num_updates = 0
        return Optimisers(self._module, self._optimiser, rate=self._rate, decay=0.0)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        is_on = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_on)


def _on_host(state: State) -> State:
    """Returns copies in host memory, because others need the GPU's."""
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


def _walk(depths: Sequence[int], at: int, end: int) -> tuple[int, int]:
    """Returns the number of rounds from token `at` to `end`, and of their tokens, bonus tokens
    included. Element i of `depths` is the accepted depth of the chain after token i + 1."""
    num_rounds = num_tokens = 0
    while at < end:
        gained = depths[at - 2] + 1
        num_rounds, num_tokens = num_rounds + 1, num_tokens + min(gained, end - at)
        at += gained
    return num_rounds, num_tokens
