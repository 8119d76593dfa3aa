"""Mean accepted length of a head against the target's greedy text.

Greedy text does not depend on the draft, so it is generated once and the rounds of speculation are
walked along it.
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
    """Returns `[N - 1, K]` int64; row i holds the greedy draft behind token i + 1, made with the
    features of positions 0 … i.

    Args:
        token_ids: `[N]` int64, N at least 2.
        num_steps: K for heads that draft a token at a time; blocks have their own.
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
    """Rounds walked.

    Attributes:
        num_rounds: verifications.
        num_tokens: accepted and bonus tokens of all rounds.
        by_position: how many rounds accepted at least the first k + 1 drafted tokens.
    """

    num_rounds: int
    num_tokens: int
    by_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens a round, with the bonus token."""
        return self.num_tokens / max(self.num_rounds, 1)


def measure_acceptance(
    head: Head,
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    num_steps: int,
) -> Acceptance:
    """Walks every answer.

    Args:
        answers: the target's greedy ids behind each prompt. The first comes out of the prefill; a
            round cut short by the end of the answer counts with what was left.
    """
    rounds = tokens = 0
    depths: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer], device=target.device)
        chains = draft_chains(head, target, ids, num_steps=num_steps).tolist()
        at = 1
        while at < len(answer):
            depth = accepted_depth(chains[len(prompt) + at - 2], answer[at:])
            gained = min(depth + 1, len(answer) - at)
            rounds, tokens, at = rounds + 1, tokens + gained, at + gained
            depths.append(depth)
    deepest = max(depths, default=0)
    by_position = tuple(sum(depth > k for depth in depths) for k in range(deepest))
    return Acceptance(rounds, tokens, by_position)


def accepted_depth(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Returns how many drafted tokens are the true ones, up to the first that is not."""
    depth = 0
    while depth < min(len(draft), len(truth)) and draft[depth] == truth[depth]:
        depth += 1
    return depth
