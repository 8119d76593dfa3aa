"""A small language model that learns: distilled from the target's distributions.

Its rows are the target's final states, whose scores by the target's lm_head are the log
probabilities that the target had of each next token.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.logging import disable_progress_bar

from services.draft.learner.student import CONFIG_FILE, Batch, Student, Teaching
from services.draft.training.frozen_target import load_causal_model
from services.draft.training.objectives import divergence
from services.draft.training.optimisers import OptimiserKind
from services.draft.training.recurrent_head import TargetEnds
from shared.errors import CheckpointError

_RATE = 0.1
"""Learning rate times hidden size, as of a head; a whole model forgets more by a large one."""


class ModelStudent(Student):
    """A causal language model with the target's tokens.

    Args:
        num_target_layers: n; rows are the states n + 1, see `HeadShape`.

    Raises:
        CheckpointError: transformers cannot load the folder.
    """

    def __init__(
        self, folder: Path, ends: TargetEnds, teaching: Teaching, *, num_target_layers: int
    ) -> None:
        try:
            self._model = load_causal_model(folder, torch.float32)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        disable_progress_bar()  # of what is saved
        self._model.to(ends.embedding.device).eval()  # no dropout: few texts, seen a few times
        self._num_layers = num_target_layers
        config = self._model.config
        self._vocab_size = min(config.vocab_size, len(ends.lm_head))
        rate, optimiser = _RATE / config.hidden_size, OptimiserKind.ADAMW
        super().__init__(self._model, folder, ends, teaching, rate=rate, optimiser=optimiser)

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
        """Position i scores token i + 1; the prompt is nobody's to draft."""
        places = torch.arange(1, batch.token_ids.shape[1], device=self._device).unsqueeze(0)
        is_scored = (places < batch.lengths[:, None]) & (places >= batch.firsts[:, None])
        logits = self._logits(batch.token_ids[:, :-1])[is_scored]
        if not len(logits):
            return logits.sum() * 0.0
        aim = F.linear(batch.rows[is_scored], self._lm_head)[:, : self._vocab_size]
        return divergence(logits, aim, self._teaching.hard)

    def _depths(self, batch: Batch, num_steps: int) -> Tensor:
        # As long as a greedy chain is right, the text itself is what it continues.
        truth = batch.token_ids[:, 2:]
        is_right = F.pad(
            self._logits(batch.token_ids[:, :-1]).argmax(-1)[:, 1:] == truth, (0, num_steps)
        )
        return is_right.long().unfold(1, num_steps, 1).cumprod(-1).sum(-1)

    def _logits(self, token_ids: Tensor) -> Tensor:
        """`[B, N]` to `[B, N, V]`, of the tokens that both models know."""
        scores: Tensor = self._model(input_ids=token_ids, use_cache=False).logits
        return scores[..., : self._vocab_size]
