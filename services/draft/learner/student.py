"""A head that is taught what a target's answers were.

Its rows are those that a draft in service reads: what `fc` makes of an EAGLE-3 head's layers, whose
`fc` the target applies and which stays as it is, or the target's final states. The latter tell the
target's whole distribution; beside the former there is only the token that the target drew.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from services.draft.learner.traffic import Example
from services.draft.training.acceptance import accepted_depth
from services.draft.training.drafting import TargetEnds, recurrent_chains
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import SHAPE_FILE, WEIGHTS_FILE, load_head
from services.draft.training.objectives import divergence
from services.draft.training.optimisers import OptimiserKind, Optimisers
from services.draft.training.recurrent_head import Eagle3Head, RecurrentHead, Unrolling
from shared.errors import CheckpointError

State = dict[str, Tensor]
_IGNORED = -100
_CONFIG = "config.json"
_SURE = 1.64
_MEAN_UPDATES = 100
"""The mean of weights reaches back so far; at first, a tenth of the updates there were."""
_RATE = 0.5
"""Learning rate times hidden size: 1e-3 for the demo's 512, which AdamW learnt fastest with among
2e-4, 1e-3 and 2e-3, and 1.2e-4 for 4,096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """Hyperparameters of the lessons of a head.

    Attributes:
        unroll: tokens that it drafts from its own states in training.
        decay: weight of each later one, see `LossTerms`.
        hard: see `LossTerms`.
        rate: highest learning rate; None takes less the wider the head is, see `_RATE`.
        warm_up: updates until then: the first steps of AdamW know no scale of the gradients, and
            cost a trained head more than a lesson brings.
        batch_size: windows of an update.
        window: most tokens of one.
        max_norm: gradients are clipped to it.
    """

    unroll: int = 4
    decay: float = 0.8
    hard: float = 0.1
    rate: float | None = None
    warm_up: int = 20
    weight_decay: float = 0.0
    batch_size: int = 8
    window: int = 512
    max_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a head gains on some examples.

    Attributes:
        walked: rounds and tokens of each, the bonus included.
    """

    walked: tuple[tuple[int, int], ...]

    @property
    def mean_length(self) -> float:
        """Tokens a round."""
        rounds, tokens = map(sum, zip(*self.walked, strict=True)) if self.walked else (0, 0)
        return tokens / max(rounds, 1)

    def beats(self, other: Measurement, gain: float) -> bool:
        """Whether it gains so much more on the same examples, and not by their luck: the rounds
        that it saves lie as far above none as one in twenty would by chance."""
        saved = [theirs[0] - own[0] for own, theirs in zip(self.walked, other.walked, strict=True)]
        mean = sum(saved) / max(len(saved), 1)
        spread = math.sqrt(sum((each - mean) ** 2 for each in saved))
        is_sure = sum(saved) >= _SURE * spread
        return self.mean_length >= other.mean_length + gain and is_sure


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
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


class Student:
    """Weights that learn, beside those that serve. Used by one thread.

    Raises:
        CheckpointError: the folder holds no head that `services.draft.training` wrote, or one that
            drafts blocks.
    """

    def __init__(self, folder: Path, ends: TargetEnds, teaching: Teaching) -> None:
        head = load_head(folder)
        if not isinstance(head, RecurrentHead):
            raise CheckpointError(f"{folder}: heads of blocks are not taught in service")
        self.head = head.to(ends.embedding.device).train()
        self.folder = folder
        self._ends, self._teaching = ends, teaching
        self._device = ends.embedding.device
        self._frozen: list[str] = []
        if isinstance(head, Eagle3Head):
            head.fc.requires_grad_(False)
            self._frozen = [name for name in head.state_dict() if name.startswith("fc.")]
        self._has_states = head.shape.algorithm is not Algorithm.EAGLE3
        self._draft_ids = self._mapped_ids()
        self._mean = copy.deepcopy(self.head.state_dict())
        self._optimisers = self._new_optimisers()

    @property
    def batch_size(self) -> int:
        """Examples of an update."""
        return self._teaching.batch_size

    @property
    def projection(self) -> Tensor | None:
        """`[H, K * H]`, what the target makes of the layers that the head reads; None where a
        single one is read as it is."""
        return self.head.fc.weight if isinstance(self.head, Eagle3Head) else None

    def state(self) -> State:
        """Returns a copy of the weights that it has come to: the mean of the latest, which is
        steadier than the last where the learning rate never falls."""
        return copy.deepcopy(self._mean)

    def restore(self, state: State) -> None:
        """Goes on from a copy of weights, with no memory of gradients."""
        self.head.load_state_dict(state)
        self._mean = copy.deepcopy(state)
        self._optimisers = self._new_optimisers()

    @contextmanager
    def as_it_was(self, state: State) -> Iterator[None]:
        """Has other weights for as long as the block runs."""
        own = copy.deepcopy(self.head.state_dict())
        self.head.load_state_dict(state)
        try:
            yield
        finally:
            self.head.load_state_dict(own)

    def learn(self, examples: Sequence[Example], generator: torch.Generator) -> float:
        """Makes one update on a window of each example; returns the loss."""
        batch = self._batch(examples, generator)
        with self._autocast():
            loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._teaching.max_norm)
        self._num_updates += 1
        self._optimisers.step(min(self._num_updates / self._teaching.warm_up, 1.0))
        share = max(1.0 / _MEAN_UPDATES, 10.0 / (10.0 + self._num_updates))
        for name, value in self.head.state_dict().items():
            if value.is_floating_point():
                self._mean[name].lerp_(value, share)
        return float(loss.detach())

    @torch.no_grad()
    def measured(self, examples: Sequence[Example], *, num_steps: int) -> Measurement:
        """Walks greedy chains along what the target said: what a draft in service would have
        gained at temperature 0."""
        walked: list[tuple[int, int]] = []
        for example in examples:
            num_rounds = num_tokens = 0
            start = max(len(example.token_ids) - self._teaching.window, 0)
            tokens = torch.tensor(example.token_ids[start:], device=self._device).unsqueeze(0)
            with self._autocast():
                chains = recurrent_chains(
                    self.head,
                    self._ends,
                    tokens[:, 1:],
                    self._rows(example, start).unsqueeze(0),
                    num_steps,
                ).tolist()
            truth = example.token_ids[start:]
            at = max(example.num_prompt_tokens - start + 1, 2)
            while at < len(truth):
                gained = accepted_depth(chains[at - 2], truth[at:]) + 1
                num_rounds, num_tokens = num_rounds + 1, num_tokens + min(gained, len(truth) - at)
                at += gained
            walked.append((num_rounds, num_tokens))
        return Measurement(tuple(walked))

    def save(self, folder: Path) -> None:
        """Writes the weights as the folder that they came from is written; what stays as it was
        keeps every bit, the rest is rounded to the type that the config names."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((self.folder / _CONFIG).read_text())
        config.pop("quantization_config", None)
        dtype = getattr(torch, config.get("torch_dtype") or "float32")
        tensors = {}
        for key, value in self._mean.items():
            plain = value.detach().cpu().contiguous()
            if not plain.is_floating_point():
                tensors[key] = plain
            else:
                is_kept = key in self._frozen
                tensors[f"{self.head.prefix}{key}"] = plain if is_kept else plain.to(dtype)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        shutil.copyfile(self.folder / SHAPE_FILE, folder / SHAPE_FILE)

    @property
    def _lm_head(self) -> Tensor:
        """In the type that it is multiplied in: of its own where products cast."""
        lm_head = self._ends.lm_head
        return lm_head if self._device.type == "cuda" else lm_head.float()

    def _rows(self, example: Example, start: int) -> Tensor:
        return example.rows[start:].to(self._device, torch.float32)

    def _batch(self, examples: Sequence[Example], generator: torch.Generator) -> _Batch:
        """Cuts a window at random where an example is longer."""
        window = self._teaching.window
        longest = min(max(len(each.token_ids) for each in examples), window)
        width = examples[0].rows.shape[1]
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        rows = torch.zeros(len(examples), longest - 1, width)
        firsts, lengths = [], []
        for index, each in enumerate(examples):
            room = max(len(each.token_ids) - longest, 0)
            start = int(torch.randint(room + 1, (), generator=generator)) if room else 0
            part = each.token_ids[start : start + longest]
            tokens[index, : len(part)] = torch.tensor(part)
            rows[index, : len(part) - 1] = each.rows[start : start + len(part) - 1].float()
            firsts.append(max(each.num_prompt_tokens - start, 0))
            lengths.append(len(part))
        moved = (tokens, rows, torch.tensor(firsts), torch.tensor(lengths))
        return _Batch(*(each.to(self._device) for each in moved))

    def _loss(self, batch: _Batch) -> Tensor:
        """The training-time test: row i of step k scores token i + k + 2."""
        head, ends, teaching = self.head, self._ends, self._teaching
        num_rows = batch.rows.shape[1]
        hidden, tokens, unrolling = batch.rows, batch.token_ids[:, 1:], Unrolling(head.shape)
        places = torch.arange(num_rows, device=self._device)
        losses, weights = [], []
        for step in range(teaching.unroll):
            known = F.pad(tokens[:, step:], (0, step))
            embedded = F.embedding(known, ends.embedding).float()
            hidden = head.advance(embedded, hidden, unrolling)
            scored = (places + step + 2).unsqueeze(0)
            is_scored = (scored < batch.lengths[:, None]) & (scored >= batch.firsts[:, None])
            if not bool(is_scored.any()):
                break
            logits = head.scores(hidden[is_scored], self._lm_head)
            losses.append(self._divergence(batch, logits, is_scored, step))
            weights.append(teaching.decay**step)
        if not losses:
            return hidden.sum() * 0.0
        total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
        assert isinstance(total, Tensor)
        return total / sum(weights)

    def _divergence(self, batch: _Batch, logits: Tensor, is_scored: Tensor, step: int) -> Tensor:
        if self._has_states:
            states = F.pad(batch.rows[:, step + 1 :], (0, 0, 0, step + 1))[is_scored]
            aim = F.linear(states, self._lm_head)
            return divergence(logits, aim, self._teaching.hard)
        truth = F.pad(batch.token_ids[:, step + 2 :], (0, step + 1))[is_scored]
        if self._draft_ids is not None:
            truth = self._draft_ids[truth]
        if not bool((truth != _IGNORED).any()):
            return logits.sum() * 0.0
        return F.cross_entropy(logits.float(), truth, ignore_index=_IGNORED)

    def _mapped_ids(self) -> Tensor | None:
        """`[V]`, the draft id of each token; None where all are drafted."""
        size = self.head.shape.draft_vocab_size
        if size is None:
            return None
        draft_ids = torch.arange(size, device=self._device)
        mapped = torch.full((self.head.shape.vocab_size,), _IGNORED, device=self._device)
        mapped[self.head.target_ids(draft_ids)] = draft_ids
        return mapped

    def _new_optimisers(self) -> Optimisers:
        self._num_updates = 0
        rate, decay = self._teaching.rate, self._teaching.weight_decay
        if rate is None:
            rate = _RATE / self.head.shape.hidden_size
        return Optimisers(self.head, OptimiserKind.ADAMW, rate=rate, decay=decay)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        is_on = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_on)
