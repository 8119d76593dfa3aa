"""The draft models that learn: heads, and language models.

A head's rows are the features that a serving draft reads. For EAGLE-3 they are the output of the
head's `fc`, which the target applies and which is not trained; the loss is the cross-entropy to the
target's tokens. For other heads they are the target's final states, whose product with the lm_head
is the target's distribution, to which the head is distilled. A language model is distilled too: its
rows are the target's final states.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.logging import disable_progress_bar

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import CONFIG_FILE, DECAY, HARD, Batch, Student
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
from services.draft.training.optimisers import OptimiserKind
from shared.errors import CheckpointError

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
        truth = F.pad(tokens, (0, num_steps), value=_IGNORED).unfold(1, num_steps, 1)[:, 1:]
        return (chains == truth).cumprod(-1).sum(-1)

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
