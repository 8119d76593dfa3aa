"""Sampling parameters of a batch's rows as tensors, so that rows of every kind share one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.speculation.penalties import Penalties
from shared.tokens import SamplingParams

# Below this a temperature is as good as 0, and dividing by it would overflow.
_MIN_TEMPERATURE = 1e-5
_NO_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of R rows as tensors; build it with `row_sampling`.

    Attributes:
        temperatures: `[R, 1]` float32, at least 1e-5 also for greedy rows.
        greedy: `[R, 1]` bool.
        top_ks: `[R, 1]` int64, 2^31 - 1 where off.
        top_ps: `[R, 1]` float64 in (0, 1].
        min_ps: `[R, 1]` float32.
        penalties: None when no row has any.
        seeds: `[R]` int64.
        bias: rows `[N]`, token ids `[N]` int64 and values `[N]` float32; None without bias.
        banned: rows and token ids, `[M]` int64 each; None when nothing is banned.
        all_greedy: no row draws.
        has_top_k: some drawing row cuts by top-k.
        max_top_k: the greatest top-k of the drawing rows when each of them has one, else None.
        has_top_p: some drawing row cuts by top-p.
        has_min_p: some drawing row cuts by min-p.
    """

    temperatures: Tensor
    greedy: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    penalties: Penalties | None
    seeds: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None
    banned: tuple[Tensor, Tensor] | None
    all_greedy: bool
    has_top_k: bool
    max_top_k: int | None
    has_top_p: bool
    has_min_p: bool

    @property
    def shapes_logits(self) -> bool:
        """Whether steps 1 to 3 do anything."""
        return not (self.penalties is None and self.bias is None and self.banned is None)


def row_sampling(
    params: Sequence[SamplingParams],
    row_counts: Sequence[int],
    *,
    device: torch.device,
    banned_token_ids: Sequence[Sequence[int]] = (),
) -> RowSampling:
    """Returns the parameters of each sequence repeated over its rows.

    Args:
        params: one for each sequence.
        row_counts: rows of each sequence (its tree's nodes and the root).
        device: where the logits are.
        banned_token_ids: for each row the tokens it must not draw, see `tree.banned_by_min_tokens`;
            empty when no row bans any.
    """
    owners = [p for p, count in zip(params, row_counts, strict=True) for _ in range(count)]
    assert len(banned_token_ids) in (0, len(owners))
    drawing = [p for p in params if not p.is_greedy]
    columns = torch.tensor([_numbers(p) for p in owners], dtype=torch.float64).to(device)
    floats = columns.to(torch.float32)
    has_all_top_k = bool(drawing) and all(p.top_k for p in drawing)
    return RowSampling(
        temperatures=floats[:, 0:1].clamp_min(_MIN_TEMPERATURE),
        greedy=columns[:, 0:1] == 0.0,
        top_ks=columns[:, 1:2].to(torch.int64),
        top_ps=columns[:, 2:3],
        min_ps=floats[:, 3:4],
        penalties=_penalties(floats) if any(p.has_penalties for p in params) else None,
        seeds=torch.tensor([_signed(p.seed) for p in owners], dtype=torch.int64).to(device),
        bias=_bias(owners, device),
        banned=_banned(banned_token_ids, device),
        all_greedy=not drawing,
        has_top_k=any(p.top_k for p in drawing),
        max_top_k=max(p.top_k for p in drawing) if has_all_top_k else None,
        has_top_p=any(p.top_p < 1.0 for p in drawing),
        has_min_p=any(p.min_p > 0.0 for p in drawing),
    )


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        float(params.top_k or _NO_TOP_K),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _penalties(columns: Tensor) -> Penalties:
    return Penalties(
        repetition=columns[:, 4:5], frequency=columns[:, 5:6], presence=columns[:, 6:7]
    )


def _signed(seed: int) -> int:
    """The low 64 bits of a seed as the int64 that holds them."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low


def _bias(
    owners: Sequence[SamplingParams], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [
        (row, token_id, value)
        for row, params in enumerate(owners)
        for token_id, value in params.logit_bias.items()
    ]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(token_ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _banned(
    banned_token_ids: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    rows = [row for row, ids in enumerate(banned_token_ids) for _ in ids]
    token_ids = [token_id for ids in banned_token_ids for token_id in ids]
    if not rows:
        return None
    return torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)
