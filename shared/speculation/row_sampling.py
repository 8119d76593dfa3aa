"""Sampling parameters of a batch's rows as tensors, so that rows of all kinds share one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.tokens import SamplingParams

_T = TypeVar("_T")

# Below this a temperature is as good as 0, and dividing by it would overflow.
_MIN_TEMPERATURE = 1e-5
_NO_TOP_K = 2**31 - 1


def uploaded_tensor(host: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. The copy goes through pinned memory: the host waits neither
    for it nor for work queued before, as it would with `torch.tensor(..., device=device)`."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def uploaded_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """Returns `[N]` int64 on the device; see `uploaded_tensor`."""
    return uploaded_tensor(torch.tensor(ids, dtype=torch.int64), device)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of R rows over V tokens.

    Attributes:
        output: `[R, V]` float32, occurrences in the output and on the row's path.
        occurs: `[R, V]` bool, in the prompt, the output or on the row's path.
    """

    output: Tensor
    occurs: Tensor

    def with_paths(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> TokenCounts:
        """Returns the counts of rows of trees.

        Args:
            owners: for each tree row, the row of these counts that it extends.
            paths: for each tree row, the tree tokens on its path.
        """
        rows = uploaded_ids(owners, self.output.device)
        output = self.output.index_select(0, rows)
        output += histogram(paths, self.output.shape[1], self.output.device)
        return TokenCounts(output, self.occurs.index_select(0, rows) | (output > 0))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Strengths of R rows, each `[R, 1]` float32; 1, 0 and 0 are off.

    Attributes:
        repetition: divides positive and multiplies negative logits of tokens that occur.
        frequency: subtracted for each occurrence in the output.
        presence: subtracted once for a token that occurs in the output.
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def count_committed(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    device: torch.device,
) -> TokenCounts:
    """Returns the counts of committed tokens, one row for each prompt and its output."""
    output = histogram(outputs, vocab_size, device)
    in_prompt = histogram(prompts, vocab_size, device) > 0
    return TokenCounts(output, in_prompt | (output > 0))


def apply_penalties(logits: Tensor, penalties: Penalties, counts: TokenCounts) -> Tensor:
    """Returns penalised logits `[R, V]` float32: repetition, then frequency and presence."""
    scaled = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where(counts.occurs, scaled, logits)
    logits = logits - penalties.frequency * counts.output
    return logits - penalties.presence * (counts.output > 0)


def histogram(token_ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Returns `[len(token_ids), V]` float32 occurrences of each token in each list.

    Does not wait for the device.
    """
    counts = torch.zeros(len(token_ids) * vocab_size, dtype=torch.float32, device=device)
    lists = [
        torch.tensor(ids, dtype=torch.int64) + row * vocab_size
        for row, ids in enumerate(token_ids)
        if len(ids)
    ]
    if lists:
        places = uploaded_tensor(torch.cat(lists), device)
        # Sums of ones are exact in float32, so the order of the additions does not matter.
        counts.scatter_add_(0, places, torch.ones((), device=device).expand(len(places)))
    return counts.view(len(token_ids), vocab_size)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that each of R rows may draw.

    Attributes:
        sets: `[R]` int64, the set of tokens that a row draws from; set 0 holds all tokens.
        members: set `[N]` and token id `[N]` int64, for each token of each set but the first.
        num_sets: number of sets, the first one included.
        max_token_id: greatest token id of `members`.
    """

    sets: Tensor
    members: tuple[Tensor, Tensor]
    num_sets: int
    max_token_id: int

    def of_rows(self, vocab_size: int) -> Tensor:
        """Returns `[R, V]` bool."""
        width = max(vocab_size, self.max_token_id + 1)  # a draft may know fewer tokens
        table = torch.zeros(self.num_sets, width, dtype=torch.bool, device=self.sets.device)
        table[0] = True
        table.index_put_(self.members, table.new_ones(()))
        return table[:, :vocab_size].index_select(0, self.sets)


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
        allowed: None when every row may draw any token.
        banned: rows and token ids, `[M]` int64 each, and addends of their logits, `[M]` float32:
            -inf, or 0 where the token may be drawn by now. None when nothing is banned.
        all_greedy: whether no row draws.
        has_top_k: whether some drawing row uses top-k.
        max_top_k: the greatest top-k of the drawing rows if all of them have one, else None.
        has_top_p: whether some drawing row uses top-p.
        has_min_p: whether some drawing row uses min-p.
    """

    temperatures: Tensor
    greedy: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    penalties: Penalties | None
    seeds: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None
    allowed: AllowedTokens | None
    banned: tuple[Tensor, Tensor, Tensor] | None
    all_greedy: bool
    has_top_k: bool
    max_top_k: int | None
    has_top_p: bool
    has_min_p: bool

    @property
    def shapes_logits(self) -> bool:
        """Whether steps 1 to 3 of `distributions` change anything."""
        return not (
            self.penalties is None
            and self.bias is None
            and self.allowed is None
            and self.banned is None
        )

    def also_banning(self, rows: Tensor, token_ids: Tensor, amounts: Tensor) -> RowSampling:
        """Returns the same parameters with further banned tokens, see `banned`."""
        if self.banned is not None:
            columns = zip(self.banned, (rows, token_ids, amounts), strict=True)
            rows, token_ids, amounts = map(torch.cat, columns)
        return replace(self, banned=(rows, token_ids, amounts))

    @property
    def is_plain(self) -> bool:
        """Whether no parameter but temperature shapes the distribution."""
        return not (self.shapes_logits or self.has_top_k or self.has_top_p or self.has_min_p)


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
        device: the device of the logits.
        banned_token_ids: for each row further tokens that it must not draw; empty for none.
    """
    assert len(params) == len(row_counts)
    assert len(banned_token_ids) in (0, sum(row_counts))
    drawing = [p for p in params if not p.is_greedy]
    counts = torch.tensor(row_counts, dtype=torch.int64)
    numbers = [
        (*sampling_columns(p), p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        for p in params
    ]
    values = torch.tensor(numbers, dtype=torch.float64)
    seeds = torch.tensor([signed_seed(p.seed) for p in params], dtype=torch.int64)
    columns = uploaded_tensor(values.repeat_interleave(counts, 0), device)
    row_seeds = uploaded_tensor(seeds.repeat_interleave(counts), device)
    has_penalties = any(p.has_penalties for p in params)
    has_all_top_k = bool(drawing) and all(p.top_k for p in drawing)
    return replace(
        sampling_of_columns(columns, row_seeds, has_draws=bool(drawing), has_cuts=False),
        penalties=Penalties(*columns[:, 4:, None].float().unbind(1)) if has_penalties else None,
        bias=_bias(params, row_counts, device),
        allowed=_allowed(params, row_counts, device),
        banned=_banned(params, row_counts, banned_token_ids, device),
        has_top_k=any(p.top_k for p in drawing),
        max_top_k=max(p.top_k for p in drawing) if has_all_top_k else None,
        has_top_p=any(p.top_p < 1.0 for p in drawing),
        has_min_p=any(p.min_p > 0.0 for p in drawing),
    )


def sampling_columns(params: SamplingParams) -> tuple[float, float, float, float]:
    """Returns the columns of `sampling_of_columns`; penalties, bias and bans are not included."""
    return (params.temperature, float(params.top_k or _NO_TOP_K), params.top_p, params.min_p)


def sampling_of_columns(
    columns: Tensor, seeds: Tensor, *, has_draws: bool, has_cuts: bool
) -> RowSampling:
    """Returns the parameters of rows from columns on the device.

    Args:
        columns: `[R, at least 4]` float64, see `sampling_columns`.
        seeds: `[R]` int64.
        has_draws: whether some row may draw; else all are greedy.
        has_cuts: whether some drawing row may have top-k, top-p or min-p.
    """
    floats = columns.to(torch.float32)
    return RowSampling(
        temperatures=floats[:, 0:1].clamp_min(_MIN_TEMPERATURE),
        greedy=columns[:, 0:1] == 0.0,
        top_ks=columns[:, 1:2].to(torch.int64),
        top_ps=columns[:, 2:3],
        min_ps=floats[:, 3:4],
        penalties=None,
        seeds=seeds,
        bias=None,
        allowed=None,
        banned=None,
        all_greedy=not has_draws,
        has_top_k=has_cuts,
        max_top_k=None,
        has_top_p=has_cuts,
        has_min_p=has_cuts,
    )


def signed_seed(seed: int) -> int:
    """Returns the low 64 bits of a seed as a signed int64."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low


def _bias(
    params: Sequence[SamplingParams], row_counts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not any(p.logit_bias for p in params):
        return None
    triples = [
        (row, token_id, value)
        for row, p in enumerate(_repeated(params, row_counts))
        for token_id, value in p.logit_bias.items()
    ]
    rows, token_ids, values = zip(*triples, strict=True)
    return (
        uploaded_ids(rows, device),
        uploaded_ids(token_ids, device),
        uploaded_tensor(torch.tensor(values, dtype=torch.float32), device),
    )


def _allowed(
    params: Sequence[SamplingParams], row_counts: Sequence[int], device: torch.device
) -> AllowedTokens | None:
    limited = [p.allowed_token_ids for p in params if p.allowed_token_ids]
    if not limited:
        return None
    numbers = iter(range(1, len(limited) + 1))
    sets = [next(numbers) if p.allowed_token_ids else 0 for p in params]
    member_sets = [number for number, ids in enumerate(limited, start=1) for _ in ids]
    token_ids = [token_id for ids in limited for token_id in ids]
    return AllowedTokens(
        uploaded_ids(_repeated(sets, row_counts), device),
        (uploaded_ids(member_sets, device), uploaded_ids(token_ids, device)),
        1 + len(limited),
        max(token_ids),
    )


def _repeated(values: Sequence[_T], row_counts: Sequence[int]) -> list[_T]:
    """Returns the value of each sequence once for each of its rows."""
    return [value for value, count in zip(values, row_counts, strict=True) for _ in range(count)]


def _banned(
    params: Sequence[SamplingParams],
    row_counts: Sequence[int],
    banned: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the banned tokens of each row, its bad words of one token included."""
    if any(p.bad_words for p in params):
        owners = _repeated(params, row_counts)
        pairs = zip(banned or [()] * len(owners), owners, strict=True)
        banned = [sorted({*ids, *p.bad_token_ids}) for ids, p in pairs]
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    token_ids = [token_id for ids in banned for token_id in ids]
    if not rows:
        return None
    amounts = torch.full((len(rows),), -math.inf, device=device)
    return uploaded_ids(rows, device), uploaded_ids(token_ids, device), amounts


ALL_TOKENS = -1
"""Every bit of a word."""
WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Returns the 32-bit words of one row's mask."""
    return -(-vocab_size // WORD_BITS)


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """Masks of the rows of trees, tree behind tree: each root's row, then its nodes'.

    Attributes:
        words: `[N, W]` int32 on the device, bit i % 32 of word i // 32 is set if the row may draw
            token i; all bits in a row that must not draw. Tokens behind the last word are
            forbidden.
        is_open: `[N]` bool on the host, False in a row that must not draw.
    """

    words: Tensor
    is_open: NDArray[np.bool_]


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Writes -inf to `logits` `[R, V]` for the tokens that some rows may not draw.

    Draws then follow the model's distribution, conditioned on allowed tokens, with any temperature,
    top-k, top-p and min-p applied afterwards.

    Args:
        rows: `[N]` int64.
        words: `[N, W]` int32, see `TreeMasks`; no row of zeros.
    """
    if logits.is_cuda:
        from shared.speculation.draw_triton import fused_mask

        fused_mask(logits, rows, words)
        return
    bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].to(torch.bool)
    is_forbidden = torch.ones(len(words), logits.shape[1], dtype=torch.bool)
    is_forbidden[:, : is_allowed.shape[1]] = ~is_allowed
    masked = logits.index_select(0, rows).masked_fill_(is_forbidden, float("-inf"))
    logits.index_copy_(0, rows, masked)
