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
    num_tokens, depths = 0, list[int]()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer], device=target.device)
        chains = draft_chains(head, target, ids, num_steps=num_steps)
        found = walk(accepted_depths(chains, ids).tolist(), len(prompt) + 1, len(ids))
        num_tokens, depths = num_tokens + max(len(answer) - 1, 0), depths + found
    deepest = max(depths, default=0)
    by_position = tuple(sum(depth > k for depth in depths) for k in range(deepest))
    return Acceptance(len(depths), num_tokens, by_position)


def accepted_depths(chains: Tensor, token_ids: Tensor) -> Tensor:
    """Returns `[..., N - 1]` int64: how many tokens of each chain come before the first one that
    differs from the text.

    Args:
        chains: `[..., N - 1, K]`; row i is drafted after token i + 1.
        token_ids: `[..., N]`, the text.
    """
    num_steps = chains.shape[-1]
    truth = F.pad(token_ids, (0, num_steps), value=-1).unfold(-1, num_steps, 1)[..., 2:, :]
    return (chains == truth).cumprod(-1).sum(-1)


def walk(depths: Sequence[int], at: int, end: int) -> list[int]:
    """Returns the accepted depth of each round from token `at` to `end`. A round takes the chain
    after token `at - 1`, and commits the accepted tokens and a bonus token.

    Args:
        depths: element i is the accepted depth of the chain after token i + 1.
    """
    found = []
    while at < end:
        found.append(depths[at - 2])
        at += found[-1] + 1
    return found
