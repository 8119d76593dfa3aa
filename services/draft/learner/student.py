"""The draft models that learn from a target's answers: heads, and language models.

A head's rows are the features that a serving draft reads. For EAGLE-3 they are the output of the
head's `fc`, which the target applies and which is not trained; the loss is the cross-entropy to the
target's tokens. For other heads they are the target's final states, whose product with the lm_head
is the target's distribution, to which the head is distilled. A language model is distilled too: its
rows are the target's final states.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.logging import disable_progress_bar

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.traffic import Example
from services.draft.training.acceptance import accepted_depths, walk
from services.draft.training.frozen_target import load_causal_model
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import (
    SHAPE_FILE,
    Eagle3Head,
    RecurrentHead,
    TargetTables,
    Unrolling,
    load_head,
    recurrent_chains,
    save_weights,
)
from services.draft.training.objectives import divergence
from services.draft.training.trainer import OptimiserKind, Optimisers
from shared.errors import CheckpointError
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
                at, end = max(first + 1, 2), lengths[index]
                walked[index] = (len(walk(row, at, end)), max(end - at, 0))
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


_IGNORED = -100
_HEAD_RATE = 0.25
"""Learning rate times hidden size: 5e-4 for the demo's 512. There Muon gained more than at 1e-3 and
2e-3, and more than AdamW at 5e-4, 1e-3 and 2e-3."""


class HeadStudent(Student):
    """An EAGLE, EAGLE-3 or MTP head.

    Raises:
        CheckpointError: the folder holds no head written by `services.draft.training`, or a head
            that drafts blocks.
    """

    def __init__(self, folder: Path, tables: TargetTables, settings: LearnerSettings) -> None:
        head = load_head(folder)
        if not isinstance(head, RecurrentHead):
            raise CheckpointError(f"{folder}: heads of blocks are not taught in service")
        self.head = head.to(tables.embedding.device).train()
        self._frozen: list[str] = []
        if isinstance(head, Eagle3Head):
            head.fc.requires_grad_(False)
            self._frozen = [name for name in head.state_dict() if name.startswith("fc.")]
        self._has_states = head.shape.algorithm is not Algorithm.EAGLE3
        rate, optimiser = _HEAD_RATE / head.shape.hidden_size, OptimiserKind.MUON
        super().__init__(head, folder, tables, settings, rate=rate, optimiser=optimiser)
        self._draft_ids = self._mapped_ids()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.shape.feature_layers

    @property
    def projection(self) -> Tensor | None:
        return self.head.fc.weight if isinstance(self.head, Eagle3Head) else None

    def save(self, folder: Path) -> None:
        """Frozen weights keep every bit."""
        dtype = self._write_config(folder)
        save_weights(self.head, self._mean, folder, dtype, self._frozen)
        shutil.copyfile(self.folder / SHAPE_FILE, folder / SHAPE_FILE)

    def _depths(self, batch: Batch, num_steps: int) -> Tensor:
        tokens = batch.token_ids[:, 1:]
        chains = recurrent_chains(self.head, self._tables, tokens, batch.rows, num_steps)
        return accepted_depths(chains, batch.token_ids)

    def _loss(self, batch: Batch) -> Tensor:
        """The training-time test of EAGLE-3: row i of step k scores token i + k + 2."""
        head, tables = self.head, self._tables
        num_rows = batch.rows.shape[1]
        hidden, tokens, unrolling = batch.rows, batch.token_ids[:, 1:], Unrolling(head.shape)
        places = torch.arange(num_rows, device=self._device)
        losses, weights = [], []
        for step in range(self._settings.unroll):
            inputs = F.pad(tokens[:, step:], (0, step))
            embedded = F.embedding(inputs, tables.embedding).float()
            hidden = head.advance(embedded, hidden, unrolling)
            scored = (places + step + 2).unsqueeze(0)
            is_scored = (scored < batch.lengths[:, None]) & (scored >= batch.firsts[:, None])
            if not bool(is_scored.any()):
                break
            logits = head.scores(hidden[is_scored], self._lm_head)
            losses.append(self._divergence(batch, logits, is_scored, step))
            weights.append(DECAY**step)
        if not losses:
            return hidden.sum() * 0.0
        total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
        assert isinstance(total, Tensor)
        return total / sum(weights)

    def _divergence(self, batch: Batch, logits: Tensor, is_scored: Tensor, step: int) -> Tensor:
        if self._has_states:
            states = F.pad(batch.rows[:, step + 1 :], (0, 0, 0, step + 1))[is_scored]
            target_logits = F.linear(states, self._lm_head)
            return divergence(logits, target_logits, HARD)
        truth = F.pad(batch.token_ids[:, step + 2 :], (0, step + 1))[is_scored]
        if self._draft_ids is not None:
            truth = self._draft_ids[truth]
        if not bool((truth != _IGNORED).any()):
            return logits.sum() * 0.0
        return F.cross_entropy(logits.float(), truth, ignore_index=_IGNORED)

    def _mapped_ids(self) -> Tensor | None:
        """Returns `[V]`, the draft id of each token; None if the head drafts all tokens."""
        size = self.head.shape.draft_vocab_size
        if size is None:
            return None
        draft_ids = torch.arange(size, device=self._device)
        mapped = torch.full((self.head.shape.vocab_size,), _IGNORED, device=self._device)
        mapped[self.head.target_ids(draft_ids)] = draft_ids
        return mapped


_MODEL_RATE = 0.1
"""Learning rate times hidden size; below that of heads, because a whole model forgets more."""


class ModelStudent(Student):
    """A causal language model with the target's tokens.

    Args:
        num_target_layers: n; rows are feature layer n + 1, see `HeadShape`.

    Raises:
        CheckpointError: transformers cannot load the folder.
    """

    def __init__(
        self,
        folder: Path,
        tables: TargetTables,
        settings: LearnerSettings,
        *,
        num_target_layers: int,
    ) -> None:
        try:
            self._model = load_causal_model(folder, torch.float32)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        disable_progress_bar()  # of saving
        self._model.to(tables.embedding.device).eval()  # no dropout: few texts, seen a few times
        self._num_layers = num_target_layers
        config = self._model.config
        self._vocab_size = min(config.vocab_size, len(tables.lm_head))
        rate, optimiser = _MODEL_RATE / config.hidden_size, OptimiserKind.ADAMW
        super().__init__(self._model, folder, tables, settings, rate=rate, optimiser=optimiser)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self._num_layers + 1,)

    def save(self, folder: Path) -> None:
        dtype = self._write_config(folder)
        config = (folder / CONFIG_FILE).read_bytes()
        weights = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self._mean.items()
        }
        self._model.save_pretrained(folder, state_dict=weights)
        (folder / CONFIG_FILE).write_bytes(config)
        for path in self.folder.glob("*.json"):
            if not (folder / path.name).exists() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)

    def _loss(self, batch: Batch) -> Tensor:
        """Position i scores token i + 1; prompt tokens are not scored."""
        places = torch.arange(1, batch.token_ids.shape[1], device=self._device).unsqueeze(0)
        is_scored = (places < batch.lengths[:, None]) & (places >= batch.firsts[:, None])
        logits = self._logits(batch.token_ids[:, :-1])[is_scored]
        if not len(logits):
            return logits.sum() * 0.0
        target_logits = F.linear(batch.rows[is_scored], self._lm_head)[:, : self._vocab_size]
        return divergence(logits, target_logits, HARD)

    def _depths(self, batch: Batch, num_steps: int) -> Tensor:
        # While a greedy chain is right it equals the text, so one forward of the text scores all.
        truth = batch.token_ids[:, 2:]
        is_right = F.pad(
            self._logits(batch.token_ids[:, :-1]).argmax(-1)[:, 1:] == truth, (0, num_steps)
        )
        return is_right.long().unfold(1, num_steps, 1).cumprod(-1).sum(-1)

    def _logits(self, token_ids: Tensor) -> Tensor:
        """Returns the scores `[B, N, V]` of tokens `[B, N]`, for the V tokens of both models."""
        scores: Tensor = self._model(input_ids=token_ids, use_cache=False).logits
        return scores[..., : self._vocab_size]
