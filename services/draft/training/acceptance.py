"""Mean accepted length of a head on the target's greedy text.

Greedy text does not depend on the draft, so it is generated once, and rounds of speculation are
simulated along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.heads import BlockHead, Head, recurrent_chains


@torch.inference_mode()
def draft_chains(head: Head, target: FrozenTarget, token_ids: Tensor, *, num_steps: int) -> Tensor:
    """Returns `[N - 1, K]` int64; row i is the greedy draft after token i + 1, from the features of
    positions 0 … i.

    Args:
        token_ids: `[N]` int64, N at least 2.
        num_steps: K of heads that draft a token at a time; for block heads K is the block's.
    """
    rows = target.read(token_ids.unsqueeze(0), head.shape.feature_layers)
    if isinstance(head, BlockHead):
        anchors = torch.arange(1, len(token_ids), device=token_ids.device).unsqueeze(0)
        states = head(target.embedding, rows.token_ids, rows.features.float(), anchors)
        return F.linear(states[0], target.lm_head.float()).argmax(-1)
    hidden = head.fuse(rows.features[:, :-1].float())
    return recurrent_chains(head, target, rows.token_ids[:, 1:], hidden, num_steps)[0]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Figures of simulated rounds.

    Attributes:
        num_rounds: number of verifications.
        num_tokens: accepted and bonus tokens of all rounds.
        by_position: element k is the number of rounds that accepted at least k + 1 drafted tokens.
    """

    num_rounds: int
    num_tokens: int
    by_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens per round, bonus token included."""
        return self.num_tokens / max(self.num_rounds, 1)


def measure_acceptance(
    head: Head,
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    num_steps: int,
) -> Acceptance:
    """Simulates the rounds of every answer.

    Args:
        answers: the target's greedy ids after each prompt. The first id comes from the prefill. A
            round at the end of the answer counts only the tokens that are left.
    """
    rounds = tokens = 0
    depths: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer], device=target.device)
        chains = draft_chains(head, target, ids, num_steps=num_steps).tolist()
        place = 1
        while place < len(answer):
            depth = accepted_depth(chains[len(prompt) + place - 2], answer[place:])
            gained = min(depth + 1, len(answer) - place)
            rounds, tokens, place = rounds + 1, tokens + gained, place + gained
            depths.append(depth)
    deepest = max(depths, default=0)
    by_position = tuple(sum(depth > k for depth in depths) for k in range(deepest))
    return Acceptance(rounds, tokens, by_position)


def accepted_depth(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Returns the number of drafted tokens before the first one that differs from `truth`."""
    depth = 0
    while depth < min(len(draft), len(truth)) and draft[depth] == truth[depth]:
        depth += 1
    return depth
