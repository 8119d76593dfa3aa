"""Attention over a paged KV cache: Triton kernels on CUDA, plain torch elsewhere.

What depends only on the batch (visibility, slots of keys) is computed once per forward, as a plan
that all layers share. CUDA uses a `SplitPlan`, see `split_plan`. The plain torch path is also the
kernels' test oracle. On a CPU a tile holds sequences with the same padded numbers of rows and keys;
so each sequence has the padding that it has alone, and a batched product gives it the same bits.
On other devices all sequences are one padded tile, because reading their lengths would wait for
the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from shared.kernels.attention_rows import RowPlan, plan_rows
from shared.kernels.cache import CacheScales, load
from shared.kernels.kernel_settings import runs_triton
from shared.kernels.latent import LatentPlan, plan_latents
from shared.kernels.split_plan import PagedRows, SplitPlan, plan_splits, sequence_of_rows
from shared.model_options import AttentionBackend

# Measured with MKL: a row of a product has the same bits for every multiple of 8 rows, while
# fewer rows take kernels of their own.
_ROW_MULTIPLE = 8
# Rounding up keeps the shapes of products few, and their edges fixed while a sequence grows.
_KEY_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """B sequences of the batch, padded to R rows and S keys each.

    Attributes:
        rows: `[B * R]` int64, indices into the T rows; padding repeats a row.
        key_slots: `[B * S]` int64, pool slots; padding reads slot 0.
        bias: `[B, 1, 1, R, S]` float32, 0 where visible and -inf elsewhere.
    """

    rows: Tensor
    key_slots: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of one forward, and the position of each row's result in them.

    Attributes:
        result_rows: `[T]` int64, indices into the concatenated rows of all tiles.
    """

    tiles: tuple[AttentionTile, ...]
    result_rows: Tensor


AttentionPlan: TypeAlias = TilePlan | SplitPlan | RowPlan | LatentPlan


def plan_attention(
    batch: PagedRows,
    *,
    sliding_window: int | None,
    num_query_groups: int,
    backend: AttentionBackend = AttentionBackend.AUTO,
    is_special: bool = False,
    is_latent: bool = False,
) -> AttentionPlan:
    """Computes masks and gather indices of one forward.

    Args:
        sliding_window: a row at position t sees positions above `t - sliding_window`; the
            position of a prefix key is its logical index. None sees everything. Must exceed the
            depth of any tree, because the window does not apply to a tree's nodes.
        num_query_groups: query heads that share a key head; the padding of rows depends on it.
        backend: `TORCH` uses the plain path on CUDA, too; `TRITON` needs CUDA.
        is_special: scores have caps or sinks, which only the kernels of single rows support.
        is_latent: values are the first part of keys, and there is one key head and no window.
    """
    has_triton = runs_triton(batch.positions)
    assert has_triton or backend is not AttentionBackend.TRITON, "Triton's kernels need CUDA"
    if has_triton and backend is not AttentionBackend.TORCH:
        if is_latent:
            assert sliding_window is None
            return plan_latents(batch, num_query_groups)
        if is_special:
            return plan_rows(batch, sliding_window, num_query_groups)
        return plan_splits(batch, sliding_window, num_query_groups)
    return plan_tiles(batch, sliding_window=sliding_window, num_query_groups=num_query_groups)


def plan_tiles(batch: PagedRows, *, sliding_window: int | None, num_query_groups: int) -> TilePlan:
    """Computes the plan of the plain path, on any device; arguments as in `plan_attention`."""
    bias = _bias(batch, sliding_window)
    key_slots = _key_slots(batch, bias.shape[1])
    row_multiple = _ROW_MULTIPLE // math.gcd(_ROW_MULTIPLE, num_query_groups)
    if batch.positions.device.type == "cpu":
        return _plan_by_shape(batch, bias, key_slots, row_multiple)
    return _plan_as_one_tile(batch, bias, key_slots, row_multiple)


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    cache_scales: CacheScales | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attends from every row to the keys that it may see.

    Args:
        queries: `[T, Hq, D]`.
        keys: `[num_slots, Hkv, D]`, one layer of the pool; Hkv divides Hq.
        values: like `keys`.
        scale: factor of the scores, usually `D ** -0.5`.
        cache_scales: scales of an e4m3 cache; None for any other.
        cap: soft bound of scores, `cap * tanh(score / cap)`; None in most models. A `SplitPlan`
            supports neither caps nor sinks.
        sinks: `[Hq]`, one score per head that counts in the softmax but has no value; None in most
            models. Source: Xiao et al., arXiv 2309.17453, section 3.3.
        value_dim: V, the number of dimensions of a value to return, the first ones; None returns
            all. With it, `values` is `keys` itself, and on CUDA the plan is a `LatentPlan`.

    Returns:
        `[T, Hq, V]` in the dtype of `queries`; scores are float32, and so are sums over keys on
        CUDA, while the plain path sums in float64.
    """
    if isinstance(plan, LatentPlan):
        from shared.kernels.latent_triton import latent_attention

        assert value_dim is not None
        assert plan.prompts is None, "keys and values of prompts are expanded first"
        return latent_attention(queries, keys, plan, scale=scale, latent_dim=value_dim)
    if isinstance(plan, RowPlan):
        from shared.kernels.attention_rows_triton import row_attention

        assert cache_scales is None, "these kernels do not support an e4m3 cache"
        assert value_dim is None
        if plan.prompts is None:
            return row_attention(queries, keys, values, plan, scale=scale, cap=cap, sinks=sinks)
        return _with_prompts(queries, keys, values, plan, _Softmax(scale, cap, sinks))
    if isinstance(plan, SplitPlan):
        assert cap is None and sinks is None and value_dim is None, "not supported by the kernels"  # noqa: PT018

        from shared.kernels.attention_triton import split_attention

        return split_attention(queries, keys, values, plan, scale=scale, cache_scales=cache_scales)
    cache, softmax = (keys, values[..., :value_dim]), _Softmax(scale, cap, sinks)
    results = [_attend(queries, cache, cache_scales, tile, softmax) for tile in plan.tiles]
    flat = results[0] if len(results) == 1 else torch.cat(results)
    return flat.index_select(0, plan.result_rows).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The softmax options of attention; see `paged_attention`."""

    scale: float
    cap: float | None
    sinks: Tensor | None

    def sink_scores(self, num_sequences: int, num_kv_heads: int, num_rows: int) -> Tensor | None:
        """Returns `[B * Hkv, groups * R, 1]` float32."""
        if self.sinks is None:
            return None
        by_head = self.sinks.float().view(1, num_kv_heads, -1, 1)
        return by_head.expand(num_sequences, -1, -1, num_rows).reshape(
            num_sequences * num_kv_heads, -1, 1
        )


def _with_prompts(
    queries: Tensor, keys: Tensor, values: Tensor, plan: RowPlan, softmax: _Softmax
) -> Tensor:
    """As `paged_attention`, with separate kernels for the rows of prompts and all other rows."""
    from shared.kernels.attention_prompts_triton import prompt_attention

    results = plan.results(queries, queries.shape[2])
    attended = paged_attention(
        plan.select(queries), keys, values, replace(plan, prompts=None),
        scale=softmax.scale, cap=softmax.cap, sinks=softmax.sinks,
    )  # fmt: skip
    plan.scatter_into(results, attended)
    prompt_attention(
        queries, keys, values, results, plan,
        scale=softmax.scale, cap=softmax.cap, sinks=softmax.sinks,
    )  # fmt: skip
    return results[:-1]


def _attend(
    queries: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: CacheScales | None,
    tile: AttentionTile,
    softmax: _Softmax,
) -> Tensor:
    """Returns `[B * R, Hq, V]` float32. The query heads of a key head are rows of one product.

    Args:
        cache: keys and values of one layer, `[num_slots, Hkv, D]` and `[num_slots, Hkv, V]`.
    """
    num_sequences, _, _, num_rows, num_keys = tile.bias.shape
    _, num_heads, head_dim = queries.shape
    num_kv_heads = cache[0].shape[1]
    num_groups = num_heads // num_kv_heads
    folded = (num_sequences * num_kv_heads, num_groups * num_rows, head_dim)
    tile_queries = (
        queries.index_select(0, tile.rows)
        .float()
        .view(num_sequences, num_rows, num_kv_heads, num_groups, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(folded)
    )
    keys = load(cache[0], tile.key_slots, None if scales is None else scales.keys)
    values = load(cache[1], tile.key_slots, None if scales is None else scales.values)
    tile_keys, tile_values = _by_head(keys, num_sequences), _by_head(values, num_sequences)
    scores = torch.bmm(tile_queries, tile_keys.transpose(1, 2)).mul_(softmax.scale)
    if softmax.cap is not None:
        scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
    scores.view(num_sequences, num_kv_heads, num_groups, num_rows, num_keys).add_(tile.bias)
    sinks = softmax.sink_scores(num_sequences, num_kv_heads, num_rows)
    attended = _weighted_mean(scores, tile_values, sinks)
    return (
        attended.view(num_sequences, num_kv_heads, num_groups, num_rows, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(num_sequences * num_rows, num_heads, -1)
    )


def _weighted_mean(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns `softmax(scores) @ values` float32 for `[N, R, S]` and `[N, S, D]`; `sinks`
    `[N, R, 1]` are scores of keys without values.

    Sums over keys run in float64 and are rounded once, so that bits depend neither on the number of
    hidden keys nor on their positions between visible ones: a token of an accepted path gets the
    logits that it would have had outside a tree. Costs about 40 us per layer for 8 rows and 320
    keys.
    """
    if sinks is not None:
        scores = torch.cat((sinks, scores), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float64)
    if not scores.is_cpu:
        # For rows that see no key, which do not occur on a CPU.
        weights.masked_fill_(scores.isneginf().all(-1, keepdim=True), 0.0)
    if sinks is not None:
        weights = weights[..., 1:]
    return torch.bmm(weights, values.double()).float()


def _by_head(rows: Tensor, num_sequences: int) -> Tensor:
    """Returns `[B * S, Hkv, D]` as `[B * Hkv, S, D]`."""
    _, num_kv_heads, head_dim = rows.shape
    num_keys = len(rows) // num_sequences
    return (
        rows.view(num_sequences, num_keys, num_kv_heads, head_dim)
        .transpose(1, 2)
        .reshape(num_sequences * num_kv_heads, -1, head_dim)
    )


def _bias(batch: PagedRows, sliding_window: int | None) -> Tensor:
    """Returns `[T, S]` float32, 0 where a row sees a logical index and -inf elsewhere."""
    device = batch.positions.device
    num_keys = _round_up(batch.max_kv_length, _KEY_MULTIPLE)
    sequence = sequence_of_rows(batch)
    indices = torch.arange(num_keys, device=device)
    rows = torch.arange(len(batch.positions), device=device)
    last_rows = batch.query_starts[1:].long() - 1
    own_indices = (batch.kv_lengths.long() - 1 - last_rows)[sequence] + rows
    prefix = batch.prefix_lengths[sequence].unsqueeze(1)
    in_prefix = indices < prefix
    visible = in_prefix | (indices <= own_indices.unsqueeze(1))
    if sliding_window is not None:
        visible &= indices > batch.positions.unsqueeze(1) - sliding_window
    if batch.tail_mask is not None:
        causal_rows = batch.is_causal[sequence].unsqueeze(1)
        assert sliding_window is None or _trees_fit(batch, sequence, sliding_window), (
            f"a tree is deeper than the sliding window of {sliding_window} positions"
        )
        in_window = in_prefix & visible
        visible = torch.where(causal_rows, visible, in_window | _tail(batch, indices, prefix))
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)


def _trees_fit(batch: PagedRows, sequence: Tensor, sliding_window: int) -> bool:
    """Whether no tree is deeper than the window; checked only on a CPU, where reading does not
    wait."""
    if batch.positions.device.type != "cpu":
        return True
    depths = batch.positions - batch.prefix_lengths[sequence]
    return not bool(((depths >= sliding_window) & ~batch.is_causal[sequence]).any())


def _tail(batch: PagedRows, indices: Tensor, prefix: Tensor) -> Tensor:
    """Returns the tail mask `[T, S]` over logical indices instead of tail columns."""
    assert batch.tail_mask is not None
    width = batch.tail_mask.shape[1]
    columns = indices - prefix
    is_tail = (columns >= 0) & (columns < width)
    return batch.tail_mask.gather(1, columns.clamp(0, width - 1).long()) & is_tail


def _key_slots(batch: PagedRows, num_keys: int) -> Tensor:
    """Returns `[B, S]` int64, the slot of each logical index; slot 0 past the sequence's end."""
    indices = torch.arange(num_keys, device=batch.positions.device)
    pages = (indices // batch.page_size).clamp_(max=batch.page_table.shape[1] - 1)
    slots = batch.page_table[:, pages].long() * batch.page_size + indices % batch.page_size
    return slots.masked_fill_(indices >= batch.kv_lengths.unsqueeze(1), 0)


def _plan_by_shape(
    batch: PagedRows, bias: Tensor, key_slots: Tensor, row_multiple: int
) -> TilePlan:
    starts = batch.query_starts.tolist()
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, kv_length in enumerate(batch.kv_lengths.tolist()):
        num_rows = _round_up(starts[index + 1] - starts[index], row_multiple)
        by_shape.setdefault((num_rows, _round_up(kv_length, _KEY_MULTIPLE)), []).append(index)
    tiles: list[AttentionTile] = []
    result_rows = [0] * starts[-1]
    num_tile_rows = 0
    for (num_rows, num_keys), sequences in by_shape.items():
        rows: list[int] = []
        for index in sequences:
            start, end = starts[index], starts[index + 1]
            result_rows[start:end] = range(num_tile_rows, num_tile_rows + end - start)
            rows += [*range(start, end), *[end - 1] * (num_rows - (end - start))]
            num_tile_rows += num_rows
        tile_rows = torch.tensor(rows, dtype=torch.int64)
        tile_bias = bias[:, :num_keys].index_select(0, tile_rows)
        tiles.append(
            AttentionTile(
                tile_rows,
                key_slots[sequences, :num_keys].flatten(),
                tile_bias.view(len(sequences), 1, 1, num_rows, num_keys),
            )
        )
    return TilePlan(tuple(tiles), torch.tensor(result_rows, dtype=torch.int64))


def _plan_as_one_tile(
    batch: PagedRows, bias: Tensor, key_slots: Tensor, row_multiple: int
) -> TilePlan:
    num_rows = _round_up(batch.max_query_length, row_multiple)
    device = batch.positions.device
    starts = batch.query_starts[:-1].long()
    offsets = torch.arange(num_rows, device=device)
    rows = (starts.unsqueeze(1) + offsets).clamp_(max=len(batch.positions) - 1).flatten()
    sequence = sequence_of_rows(batch)
    own_rows = torch.arange(len(batch.positions), device=device)
    result_rows = sequence * num_rows + own_rows - starts[sequence]
    tile_bias = bias.index_select(0, rows).view(len(starts), 1, 1, num_rows, -1)
    # A padding row may be another sequence's, with more keys: those read slot 0.
    tile = AttentionTile(rows, key_slots.flatten(), tile_bias)
    return TilePlan((tile,), result_rows)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
