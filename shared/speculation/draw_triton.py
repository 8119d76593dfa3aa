"""Triton kernels of the coupled draw (noise and argmax in one pass over the vocabulary) and of
masks; device functions of the noise and of top-k search."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.speculation.row_sampling import RowSampling

# Masks the tokens that rows may not draw.

_MASK_BLOCK = 4096


@triton.jit(do_not_specialize=["row_stride", "num_words"])  # type: ignore[untyped-decorator]
def mask_blocks(logits, rows, words, row_stride, vocab_size, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes -inf where a token's bit is not set, in one block of one of `rows`.

    Args:
        words: `[N, num_words]` int32; bits behind them count as not set.
    """
    place = tl.program_id(0)
    row = tl.load(rows + place)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tokens // 32
    word = tl.load(words + place * num_words + index, mask=index < num_words, other=0)
    is_allowed = ((word >> (tokens % 32)) & 1) == 1
    tl.store(
        logits + row * row_stride + tokens, float("-inf"),
        mask=(tokens < vocab_size) & (is_allowed == 0),
    )  # fmt: skip


def fused_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `row_masks.mask_logits`."""
    assert logits.stride(1) == 1
    assert words.is_contiguous()
    vocab_size = logits.shape[1]
    mask_blocks[(len(rows), triton.cdiv(vocab_size, _MASK_BLOCK))](
        logits, rows, words, logits.stride(0), vocab_size, words.shape[1],
        BLOCK=_MASK_BLOCK, num_warps=4,
    )  # fmt: skip


# The noise of `distributions.py` in Triton, bit for bit.
#
# Words are uint32, whose products wrap as in the paper; logarithms are float64 for the reason given
# in `distributions.py`.


@triton.jit
def philox_words(blocks, position, seed):  # type: ignore[no-untyped-def]
    """Returns the four words of each block `[N]` of one position and seed, of stream 0."""
    c0 = blocks.to(tl.uint32)
    c1 = tl.zeros_like(c0)
    c2 = (position & 0xFFFFFFFF).to(tl.uint32) + c1
    c3 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + c1
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32) + c1
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + c1
    first = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    second = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, first)
        high_1 = tl.umulhi(c2, second)
        low_0 = c0 * first
        low_1 = c2 * second
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(words):  # type: ignore[no-untyped-def]
    """Returns the float32 noise of words."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_row(first_token, position, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the noise of BLOCK consecutive tokens; BLOCK and `first_token` are multiples of 4."""
    blocks = first_token // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox_words(blocks, position, seed)
    # Two joins order the words 0, 2, 1, 3, so the middle words are swapped here.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel_of(tl.reshape(words, [BLOCK]))


@triton.jit
def gumbel_at(tokens, position, seed):  # type: ignore[no-untyped-def]
    """Returns the noise of the given tokens `[N]`."""
    w0, w1, w2, w3 = philox_words(tokens // 4, position, seed)
    place = tokens % 4
    low = tl.where(place == 0, w0, w1)
    high = tl.where(place == 2, w2, w3)
    return gumbel_of(tl.where(place < 2, low, high))


# Top-k search in Triton.
#
# A *key* orders like `stable_topk`: by value, then by the lowest index. Its high half holds the
# float's bits, changed to order like integers; its low half is 2^32 - 1 less the index.

NO_KEY = tl.constexpr(-(2**63))
_NO_HALF = tl.constexpr(-(2**31))


@triton.jit
def keys_of(values, indices):  # type: ignore[no-untyped-def]
    """Returns int64 keys of float32 values; indices are below 2^32."""
    # Adding zero turns -0.0, whose bits order below 0.0, into 0.0.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - indices.to(tl.int64))


@triton.jit
def value_of(keys):  # type: ignore[no-untyped-def]
    """Returns the float32 values of keys."""
    ordered = (keys >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def index_of(keys):  # type: ignore[no-untyped-def]
    """Returns the int64 indices of keys."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def best_of(keys, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the highest keys along an axis of which one element remains; faster than `tl.max`.

    A warp has an instruction for the highest of 32 numbers of 32 bits. Indices are below 2^31, so
    low halves order like signed numbers.
    """
    high = (keys >> 32).to(tl.int32)
    highest = tl.max(high, axis, keep_dims=True)
    lows = tl.where(high == highest, keys.to(tl.int32), _NO_HALF)
    lowest_index = tl.max(lows, axis, keep_dims=True)
    return (highest.to(tl.int64) << 32) | (lowest_index.to(tl.int64) & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def best_in_lists(  # type: ignore[no-untyped-def]
    keys, num_rows, num_lists, list_size,
    COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns the COUNT best keys of each row, best first, `[ROWS, LANES]`, `NO_KEY` behind them.

    Args:
        keys: `num_rows` rows of `num_lists` lists of `list_size` keys, best first.
        LANES: at least the number of lists and COUNT, so that no key changes its thread.
    """
    # On one axis, so that a warp takes one row after another, whatever the strides.
    places = tl.arange(0, ROWS * LANES)
    row = places // LANES
    lane = places % LANES
    nexts = keys + (row * num_lists + lane) * list_size
    heads = tl.load(nexts, mask=(row < num_rows) & (lane < num_lists), other=NO_KEY)
    num_left = tl.zeros_like(places) + list_size
    heads = heads.reshape(ROWS, LANES)
    found = tl.zeros_like(heads) + NO_KEY
    rank = lane.reshape(ROWS, LANES)
    for place in tl.static_range(COUNT):
        best = best_of(heads, 1)
        found = tl.where(rank == place, best, found)
        if place + 1 < COUNT:
            is_best = (heads == best) & (heads != NO_KEY)
            is_taken = is_best.reshape(ROWS * LANES)
            num_left -= is_taken.to(tl.int32)
            nexts += is_taken.to(tl.int32)
            following = tl.load(nexts, mask=is_taken & (num_left > 0), other=NO_KEY)
            heads = tl.where(is_best, following.reshape(ROWS, LANES), heads)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def num_before(values, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns for each of `count` stored values how many have a higher key, `[BLOCK]`."""
    own = tl.arange(0, BLOCK)
    keys = keys_of(tl.load(values + own, mask=own < count, other=float("-inf")), own)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, CHUNK):
        others = start + tl.arange(0, CHUNK)
        value = tl.load(values + others, mask=others < count, other=float("-inf"))
        # Elements past the last value have the highest indices, so they are above none.
        before += tl.sum((keys_of(value, others)[:, None] > keys[None, :]).to(tl.int32), 0)
    return before


_BLOCK = 2048


@triton.jit(do_not_specialize=["row_stride"])  # type: ignore[untyped-decorator]
def block_maxima(  # type: ignore[no-untyped-def]
    logits, maxima, row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    """Writes the highest logit of one block of one row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits + row.to(tl.int64) * row_stride + tokens,
        mask=tokens < vocab_size, other=float("-inf"),
    )  # fmt: skip
    tl.store(maxima + row * num_blocks + block, tl.max(values.to(tl.float32), 0))


@triton.jit(do_not_specialize=["row_stride"])  # type: ignore[untyped-decorator]
def draw_blocks(  # type: ignore[no-untyped-def]
    logits, temperatures, greedy, seeds, positions, maxima, best_values, best_tokens,
    row_stride, vocab_size, num_blocks,
    HAS_DRAWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the best token of one block of one row, and its value, perturbed unless greedy."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    values = tl.load(
        logits + row.to(tl.int64) * row_stride + tokens, mask=is_token, other=float("-inf")
    ).to(tl.float32)
    if HAS_DRAWS:
        if tl.load(greedy + row) == 0:
            blocks = tl.arange(0, BLOCKS)
            parts = tl.load(
                maxima + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")
            )
            scaled = tl.div_rn(values - tl.max(parts, 0), tl.load(temperatures + row))
            position = tl.load(positions + row)
            values = scaled + gumbel_row(block * BLOCK, position, tl.load(seeds + row), BLOCK)
            values = tl.where(is_token, values, float("-inf"))
    best = best_of(tl.where(is_token, keys_of(values, tokens), NO_KEY), 0)
    place = row * num_blocks + block + tl.arange(0, 1)
    tl.store(best_values + place, value_of(best))
    tl.store(best_tokens + place, index_of(best).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def pick_tokens(best_values, best_tokens, drawn, num_blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the best token of one row among the best of its blocks; the lowest id on ties."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    values = tl.load(best_values + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    _, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(drawn + row, tl.load(best_tokens + row * num_blocks + place).to(tl.int64))


def fused_draw(logits: Tensor, sampling: RowSampling | None, positions: Tensor) -> Tensor:
    """Returns `draw_tokens` of rows with no parameter but temperature, `[R]` int64.

    Args:
        logits: `[R, V]` of any float type.
        sampling: None when every row is greedy.
        positions: `[R]` int64.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    blocks, device = triton.next_power_of_2(num_blocks), logits.device
    values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    maxima, grid = values, (num_rows, num_blocks)
    columns: tuple[Tensor, ...] = (values,) * 3
    if sampling is not None:
        maxima = torch.empty_like(values)
        block_maxima[grid](
            logits, maxima, logits.stride(0), vocab_size, num_blocks, BLOCK=_BLOCK, num_warps=4
        )
        columns = (sampling.temperatures, sampling.greedy, sampling.seeds)
        columns = tuple(column.contiguous() for column in columns)
    draw_blocks[grid](
        logits, *columns, positions.contiguous(), maxima, values, tokens,
        logits.stride(0), vocab_size, num_blocks,
        HAS_DRAWS=sampling is not None, BLOCK=_BLOCK, BLOCKS=blocks, num_warps=8,
    )  # fmt: skip
    pick_tokens[(num_rows,)](values, tokens, drawn, num_blocks, BLOCKS=blocks, num_warps=1)
    return drawn
