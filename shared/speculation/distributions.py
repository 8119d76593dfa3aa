"""From raw logits to the distribution of each row's token, and the noise that draws from it.

The steps, in order, all of them per row:

1. repetition penalty, then frequency and presence penalties;
2. logit bias, so that a bias of 100 decides whatever the penalties do;
3. removed tokens: tokens outside the allowed ones, bad words, and stop tokens before the minimum
   length;
4. temperature;
5. top-k, then top-p over the renormalised rest, then min-p.

Steps 1 to 3 have SGLang's order, steps 4 and 5 that of transformers. vLLM adds the bias before the
penalties and applies min-p before top-k, so its distribution differs for a biased token under a
repetition penalty, and for requests with both min-p and top-p.

Of equal logits, truncation and greedy rows keep the lowest token id.

Raw logits may hold -inf for tokens that a grammar forbids, but not in a whole row.

Top-k and top-p are one cut of the descending order. Both keep the first tokens of the order by
(logit, then lowest id). So the number of kept tokens describes the cut, and ids matter only among
the tokens that tie at its border. bfloat16 logits tie often; a cut that left ties to the device
would not be reproducible.

Confidence is the score by which a draft ranks candidates: how likely the target accepts each.
Scores of one row are log probabilities of disjoint events. So they sum along a path to the log
probability that the whole path is accepted, by which tree growth ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from shared.speculation.row_sampling import RowSampling, TokenCounts, apply_penalties, uploaded_ids
from shared.tokens import TokenLogprobs

_LOW_BITS = 32
_SIGN_FREE = 0x7FFFFFFF

# Mass of the most probable token in integer units. A row of 2^18 such tokens sums to 2^62.
_MASS_UNIT = 2.0**44


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k highest values of the last axis, best first; the lowest index wins a tie.

    Each value becomes an integer key that orders like (value, -index), so no two keys are equal
    and every device returns the same indices. A CPU makes keys only if there is a tie, because
    they take several times as long as `torch.topk` there.

    Args:
        values: `[..., N]` float32 without NaN, N < 2^32.
        k: in [1, N].

    Returns:
        Values `[..., k]` float32 and indices `[..., k]` int64.
    """
    assert values.dtype == torch.float32
    size = values.shape[-1]
    if values.is_cpu and k < size:
        ordered, indices = values.topk(k + 1, dim=-1)
        if not (ordered[..., 1:] == ordered[..., :-1]).any():
            return ordered[..., :k], indices[..., :k]
    # Adding zero turns -0.0, whose bits order below 0.0, into 0.0.
    bits = (values + 0.0).view(torch.int32)
    signed = torch.where(bits < 0, bits ^ _SIGN_FREE, bits).to(torch.int64)
    descending_index = torch.arange(size - 1, -1, -1, device=values.device)
    keys = (signed << _LOW_BITS) | descending_index
    best = keys.topk(k, dim=-1, largest=True, sorted=True).values
    indices = (size - 1) - (best & ((1 << _LOW_BITS) - 1))
    return values.gather(-1, indices), indices


def keep_top(scaled: Tensor, top_ks: Tensor, top_ps: Tensor | None, *, width: int) -> Tensor:
    """Returns `scaled` with -inf outside top-k, then outside top-p of the renormalised rest.

    Args:
        scaled: `[R, V]` float32 logits over temperature, the highest of a row 0.
        top_ks: `[R, 1]` int64, at least 1; off above V.
        top_ps: `[R, 1]` float64 in (0, 1], off at 1; None when off in every row.
        width: number of tokens to order: at least the top-k of every row if all have one, else V.
            Rows with a larger top-k keep `width` tokens.
    """
    if width == scaled.shape[-1]:
        ordered = scaled.sort(dim=-1, descending=True).values
    else:
        ordered = scaled.topk(width, dim=-1, sorted=True).values
    num_kept = top_ks.clamp_max(width)
    if top_ps is not None:
        num_kept = torch.where(top_ps < 1.0, _num_in_mass(ordered, num_kept, top_ps), num_kept)
    return _keep_highest(scaled, num_kept, lowest=ordered.gather(-1, num_kept - 1))


def _num_in_mass(ordered: Tensor, num_kept: Tensor, top_ps: Tensor) -> Tensor:
    """Returns `[R, 1]`, the fewest of the first `num_kept` tokens whose share reaches top-p.

    Probability masses are summed as integers, because integer sums do not depend on the order of
    the additions; a parallel scan of floats does not promise that.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    masses = (ordered.exp().to(torch.float64) * _MASS_UNIT).to(torch.int64)
    masses = masses.masked_fill(ranks >= num_kept, 0)
    sums = masses.cumsum(dim=-1)
    needed = sums[:, -1:].to(torch.float64) * top_ps
    # A token stays while the mass before it has not reached top-p, so the first always does.
    is_short = (sums - masses).to(torch.float64) < needed
    return torch.minimum(is_short.sum(dim=-1, keepdim=True), num_kept)


def _keep_highest(scaled: Tensor, num_kept: Tensor, *, lowest: Tensor) -> Tensor:
    """Keeps the `num_kept` highest values; at the lowest kept value the lowest ids stay."""
    above = scaled > lowest
    tied = scaled == lowest
    num_tied_kept = num_kept - above.sum(dim=-1, keepdim=True)
    # Inclusive counts: the j-th tied token stays while j <= num_tied_kept.
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied_kept))
    return scaled.masked_fill(~kept, -math.inf)


def target_log_probs(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns the log probabilities of each row.

    Args:
        logits: `[R, V]` raw logits of any float type.
        sampling: of the same R rows.
        counts: needed when a row has penalties.

    Returns:
        `[R, V]` float32, normalised, -inf for removed tokens; at least one token is left. A greedy
        row has all its mass on its highest logit.
    """
    logits = shaped_logits(logits, sampling, counts)
    if sampling.all_greedy:
        return _one_hot(logits)
    scaled = truncated(logits, sampling)
    return torch.where(sampling.greedy, _one_hot(logits), scaled.log_softmax(dim=-1))


def shaped_logits(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns `[R, V]` float32 logits after penalties, bias and removals (steps 1 to 3)."""
    logits = logits.to(torch.float32)
    if sampling.penalties is not None:
        assert counts is not None, "rows with penalties need token counts"
        logits = apply_penalties(logits, sampling.penalties, counts)
    if sampling.bias is not None:
        rows, token_ids, values = sampling.bias
        logits = logits.index_put((rows, token_ids), values, accumulate=True)
    return _allowed_only(logits, sampling)


def truncated(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Returns `[R, V]` logits over temperature, highest 0, -inf beyond top-k, top-p and min-p.

    Greedy rows are treated as if their temperature were 1e-5: their highest logit stays, and which
    others are cut is undefined.
    """
    # Subtracting the maximum first keeps a tiny temperature from overflowing into inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperatures
    kept = scaled
    if sampling.has_top_k or sampling.has_top_p:
        # The width may cut greedy rows too narrow; their result is not used.
        width = min(sampling.max_top_k or scaled.shape[-1], scaled.shape[-1])
        top_ps = sampling.top_ps if sampling.has_top_p else None
        kept = keep_top(scaled, sampling.top_ks, top_ps, width=width)
    if sampling.has_min_p:
        kept = kept.masked_fill(scaled.exp() < sampling.min_ps, -math.inf)
    return kept


def _one_hot(logits: Tensor) -> Tensor:
    """All mass on the highest logit; torch.argmax takes the lowest index of equal ones."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter_(-1, best, 0.0)


def _allowed_only(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Removes tokens (step 3), except from a row that would have none left."""
    remaining = logits
    if sampling.allowed is not None:
        is_allowed = sampling.allowed.of_rows(logits.shape[-1])
        remaining = remaining.masked_fill(~is_allowed, -math.inf)
    if sampling.banned is not None:
        rows, token_ids, amounts = sampling.banned
        amounts = amounts.to(logits.dtype)
        remaining = remaining.index_put((rows, token_ids), amounts, accumulate=True)
    if remaining is logits:
        return logits
    is_empty = (remaining == -math.inf).all(dim=-1, keepdim=True)
    return torch.where(is_empty, logits, remaining)


def coupled_confidence(
    logits: Tensor,
    sampling: RowSampling,
    noise: Tensor | None,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Returns the log probability that the coupled rule accepts each token.

    The target takes the argmax of `target_logits + T * noise`, and the draft knows T and the noise.
    It does not know how far the target's logits are from its own. At T = 0 EAGLE-2 ranks by the
    softmax of the draft's logits l. That is the probability of the argmax if the target's logits
    are l plus independent unit Gumbel errors. At T > 0 the same errors give token v the probability

        P(argmax(l + error + T * noise) = v) = softmax(l + T * noise)_v,

    so the noise enters as a known shift of the logits and the greedy score is the case T = 0. The
    first child is then the token that the draft itself would draw, and its score measures how
    clearly it leads. Ranking by the plain draft probability would ignore the noise: a likely token
    with bad noise would come first although the draft expects it to lose.

    The error of a real draft need not have unit scale. That distorts the scores alike in every row,
    as it does for greedy EAGLE-2.

    Args:
        logits: `[R, V]` raw draft logits.
        sampling: of the same R rows. The draft may omit parameters that cost more than they gain.
        noise: `[R, V]` float32 noise of each row's seed and of the position of the scored tokens,
            the same that the target will use. Rows of one sequence and level share it. None when
            every row is greedy.
        counts: needed when a row has penalties.

    Returns:
        `[R, V]` float32, -inf for tokens the row's sampling parameters remove.
    """
    logits = shaped_logits(logits, sampling, counts)
    if sampling.all_greedy:
        return logits.log_softmax(dim=-1)
    assert noise is not None, "drawing rows need the noise the target will use"
    temperatures = torch.where(sampling.greedy, 0.0, sampling.temperatures)
    removed = ~sampling.greedy & (truncated(logits, sampling) == -math.inf)
    shifted = logits + temperatures * noise
    return shifted.masked_fill(removed, -math.inf).log_softmax(dim=-1)


def point_mass_confidence(
    logits: Tensor, sampling: RowSampling, counts: TokenCounts | None = None
) -> Tensor:
    """Returns the log probability that the point-mass rule accepts each token.

    That rule accepts a child with the target's probability of its token, so the score is the
    draft's estimate of that probability. Arguments and result are those of `coupled_confidence`.
    """
    plain = shaped_logits(logits, sampling, counts).log_softmax(dim=-1)
    if sampling.all_greedy:
        return plain
    return torch.where(sampling.greedy, plain, target_log_probs(logits, sampling, counts))


def packed_logprobs(
    logits: Tensor, token_ids: Tensor, width: int, named: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Computes log probabilities for `unpacked_logprobs`. Does not wait for the device.

    Args:
        logits: `[R, V]` raw logits of any float type.
        token_ids: `[R]` int64.
        width: number of alternatives of each row.
        named: R lists of further tokens to report log probabilities of; empty for none.

    Returns:
        `[R, 2 + 2 * min(width, V) + K]` float64: log probability, rank, then values and ids of the
        alternatives, then values of up to K named tokens. Ids and ranks are exact in float64, so
        one transfer is enough.
    """
    log_probs = logits.to(torch.float32).log_softmax(dim=-1)
    chosen_ids = token_ids.unsqueeze(1)
    chosen = log_probs.gather(1, chosen_ids)
    ranks = (log_probs > chosen).sum(dim=1, keepdim=True) + 1
    width = min(width, logits.shape[-1])
    if width:
        top_values, top_ids = stable_topk(log_probs, width)
    else:
        top_values, top_ids = chosen[:, :0], chosen_ids[:, :0]
    parts = [chosen, ranks, top_values, top_ids]
    if any(named):
        count = _most(named)
        padded = [token_id for ids in named for token_id in (*ids, *[0] * (count - len(ids)))]
        index = uploaded_ids(padded, logits.device).view(len(named), count)
        parts.append(log_probs.gather(1, index))
    return torch.cat([part.double() for part in parts], dim=1)


def unpacked_logprobs(
    packed: Tensor, num_top: Sequence[int], named: Sequence[Sequence[int]] = ()
) -> tuple[TokenLogprobs, ...]:
    """Returns the log probabilities of each row.

    Args:
        packed: see `packed_logprobs`; on the host.
        num_top: number of alternatives to return for each row.
        named: the same as in `packed_logprobs`.
    """
    width = (packed.shape[1] - 2 - _most(named)) // 2
    return tuple(
        _row(row, width, count, own)
        for row, count, own in zip(
            packed.tolist(), num_top, named or [()] * len(num_top), strict=True
        )
    )


def _most(named: Sequence[Sequence[int]]) -> int:
    return max(map(len, named), default=0)


def _row(packed: Sequence[float], width: int, num_top: int, named: Sequence[int]) -> TokenLogprobs:
    log_prob, rank, *rest = packed
    values, ids, named_values = rest[:width], rest[width : 2 * width], rest[2 * width :]
    top = tuple((int(i), v) for i, v in zip(ids, values, strict=True))
    further = tuple(zip(named, named_values, strict=False))
    return TokenLogprobs(log_prob=log_prob, rank=int(rank), top=top[:num_top] + further)


# Gumbel noise is a pure function of (seed, absolute position, token id, stream). Nothing is drawn
# from a generator. So any process, on any device, in any order, computes the same noise for the
# same token of the same position: the draft, the target, a restarted target.
#
# Two choices keep the values the same on CPU and GPU. The random words come from Philox by
# integer arithmetic in int64, which wraps modulo 2^64 everywhere. The two logarithms run in
# float64 and are rounded to float32 once. Libraries differ in the last bits of a logarithm. With
# 29 spare bits the rounded results differ with a probability of about 1e-9 for each value, where
# float32 logarithms differ every few values. Float32 could not hold the words either: the highest
# would round to u = 1, whose noise is infinite.
#
# On a GPU all operations have fixed shapes and none waits for it, so CUDA graphs can capture
# them.

Array = TypeVar("Array", Tensor, "np.ndarray[Any, np.dtype[np.int64]]")
Words: TypeAlias = tuple[Array, Array, Array, Array]
Key: TypeAlias = tuple[Array, Array]

_NUM_ROUNDS = 10
_WORDS_PER_BLOCK = 4
_WORD_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_COIN_SIDES = 2**52


def philox_4x32_10(counter: Words[Array], key: Key[Array]) -> Words[Array]:
    """Returns the four random words of a counter.

    All arrays are int64 holding words in [0, 2^32), of shapes that broadcast. On a CPU NumPy's
    take half the time of torch's. Words that are
    shared by a row or a column stay small for the first rounds, which then cost next to nothing.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
    section 3.3 and table 2.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        # c1 and c3 keep the whole product: their high halves meet only xor and a mask, so the low
        # half needs a mask of its own only after the last round.
        c0, c1 = ((product_1 >> 32) ^ c1 ^ k0) & _WORD_MASK, product_1
        c2, c3 = ((product_0 >> 32) ^ c3 ^ k1) & _WORD_MASK, product_0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD_MASK
        k1 = (k1 + _KEY_STEPS[1]) & _WORD_MASK
    return c0, c1 & _WORD_MASK, c2, c3 & _WORD_MASK


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, *, stream: int = 0) -> Tensor:
    """Returns standard Gumbel noise for every token id of each row.

    Args:
        seeds: `[R]` int64; all 64 bits key the generator.
        positions: `[R]` int64, absolute position of the token to be drawn, not of the row that
            predicts it.
        vocab_size: V. A token's noise does not depend on it.
        stream: in [0, 2^32); separates uses of one seed that must be independent.

    Returns:
        `[R, V]` float32, finite, in about [-3.2, 22.9].
    """
    blocks = torch.arange(-(-vocab_size // _WORDS_PER_BLOCK), device=seeds.device).unsqueeze(0)
    words: Sequence[Tensor]
    if not seeds.is_cpu:
        words = _words(seeds.unsqueeze(1), positions.unsqueeze(1), blocks, stream)
        return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    # Nodes of one tree level share their noise, so each pair of seed and position is computed once.
    pairs = torch.stack((seeds, positions))
    pairs, rows = pairs.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
    columns = pairs.unsqueeze(2).numpy()
    host_words = _words(columns[0], columns[1], blocks.numpy(), stream)
    words = [torch.from_numpy(word) for word in host_words]
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]).index_select(0, rows)


def fresh_generator() -> torch.Generator:
    """Returns a host generator with an unpredictable seed."""
    generator = torch.Generator()
    generator.seed()
    return generator


def fresh_seeds(num_seeds: int, generator: torch.Generator) -> Tensor:
    """Returns `[num_seeds]` int64 seeds for noise to be used once; `generator` is on the host."""
    low, high = -(2**63), 2**63 - 1
    return torch.randint(low, high, (num_seeds,), generator=generator, dtype=torch.int64)


def fresh_coins(num_coins: int, generator: torch.Generator) -> tuple[float, ...]:
    """Returns uniform float64 numbers strictly inside (0, 1): odd multiples of 2^-53."""
    sides = torch.randint(_COIN_SIDES, (num_coins,), generator=generator, dtype=torch.int64)
    return tuple(((sides.to(torch.float64) + 0.5) / _COIN_SIDES).tolist())


def _words(seeds: Array, positions: Array, blocks: Array, stream: int) -> Words[Array]:
    """Four words for each row `[R, 1]` and block `[1, B]`; token id `4 * block + w` owns word w."""
    (low, high), key = [
        (values & _WORD_MASK, (values >> 32) & _WORD_MASK) for values in (positions, seeds)
    ]
    return philox_4x32_10((blocks, positions * 0 + stream, low, high), key)


def _gumbel(words: Tensor) -> Tensor:
    """-log(-log u) with u = (word + 1/2) / 2^32, exact in float64 and strictly inside (0, 1)."""
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
