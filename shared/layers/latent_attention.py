"""Self-attention whose keys and values are made of one narrow vector a token (MLA).

The cache holds that vector, and beside it a rotated key that all heads share. What expands it into
a head's keys is multiplied into the queries instead, and what expands it into values into the
result, so that all heads attend to the same rows of the cache and a token takes one row.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.attention import AttentionPlan, paged_attention
from shared.kernels.attention_rows import RowPlan
from shared.kernels.cache import store
from shared.kernels.partials import Partials
from shared.kernels.pointwise import rotate
from shared.layers.attention import AttentionShape, ForwardContext
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part

# Measured with MKL: a row of a product has the same bits for every multiple of 8 rows.
_ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Projections, rotation, cache and attention of one layer.

    Attributes:
        shape: one key head, as wide as the latent vector and the rotated key together.
        compress: input to the compressed queries, then the latent vector, then the rotated key.
        query_norm: of the compressed queries; None where they are there already.
        queries: from there to `num_heads` of a part without rotation and a rotated one; None as
            for the norm.
        latent_norm: of the latent vector.
        key_up: `[num_heads, N, L]`, expands a latent vector into a head's N unrotated dimensions.
        value_up: `[num_heads, V, L]`, expands it into a head's values.
        output: `num_heads * V` back to the hidden size.
        layer: index of this layer's keys in the pool.
    """

    shape: AttentionShape
    compress: Linear
    query_norm: RmsNorm | None
    queries: Linear | None
    latent_norm: RmsNorm
    key_up: Tensor
    value_up: Tensor
    output: Linear
    layer: int

    def steadied(self) -> LatentAttention:
        """Returns the same attention with products that keep a row's bits; see
        `Linear.steadied`."""
        return replace(
            self,
            compress=self.compress.steadied(),
            queries=None if self.queries is None else self.queries.steadied(),
            output=self.output.steadied(),
        )

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`; writes the rows' latent vectors and keys to the pool."""
        return self.output(self._attended(hidden, context))

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        return self.output.part(self._attended(hidden, context))

    def _attended(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns `[T, num_heads * V]`."""
        pool, tables = context.pool, context.tables_of(self.shape)
        latent_dim = self.key_up.shape[2]
        rotary_dim = self.shape.head_dim - latent_dim
        made, latents, keys = self._compressed(hidden, latent_dim, rotary_dim)
        heads = made.view(len(hidden), self.shape.num_heads, -1)
        straight, turned = heads[..., :-rotary_dim], heads[..., -rotary_dim:]
        turned = rotate(turned, *tables)
        rows = torch.cat((latents.unsqueeze(1), rotate(keys.unsqueeze(1), *tables)), dim=-1)
        cache = pool.keys[self.layer]
        store(cache, context.batch.slots, rows, None)
        plan = context.plans[self.shape.sliding_window]
        if isinstance(plan, RowPlan) and plan.prompts is not None:
            return self._expanded(torch.cat((straight, turned), dim=-1), cache, plan).flatten(1)
        return self._absorbed(straight, turned, cache, plan).flatten(1)

    def _absorbed(
        self, straight: Tensor, turned: Tensor, cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Returns `[T, H, V]` with the expansion of keys multiplied into queries, and that of
        values into results."""
        assert self.shape.scale is not None
        attended = paged_attention(
            torch.cat((_by_head(straight, self.key_up), turned), dim=-1),
            cache,
            cache,
            plan,
            scale=self.shape.scale,
            value_dim=self.key_up.shape[2],
        )
        return _by_head(attended, self.value_up.transpose(1, 2))

    def _expanded(self, queries: Tensor, cache: Tensor, plan: RowPlan) -> Tensor:
        """Returns `[T, H, V]` with keys and values of prompts expanded: less arithmetic, where
        many rows share them."""
        from shared.kernels.attention_prompts_triton import expanded_attention

        assert self.shape.scale is not None
        straight_dim, value_dim = self.key_up.shape[1], self.value_up.shape[1]
        results = plan.results(queries, value_dim)
        own = plan.taken(queries)
        straight, turned = own[..., :straight_dim], own[..., straight_dim:]
        plan.put(results, self._absorbed(straight, turned, cache, replace(plan, prompts=None)))
        expanded_attention(
            queries, cache, self.key_up, self.value_up, results, plan, scale=self.shape.scale
        )
        return results[:-1]

    def _compressed(
        self, hidden: Tensor, latent_dim: int, rotary_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, normed latent vectors `[T, L]` and keys before rotation `[T, R]`."""
        made = self.compress(hidden)
        first_latent = made.shape[1] - latent_dim - rotary_dim
        queries, first_key = made[:, :first_latent], first_latent + latent_dim
        if self.queries is not None:
            assert self.query_norm is not None
            queries = self.queries(self.query_norm(queries.contiguous()))
        latents = self.latent_norm(made[:, first_latent:first_key].contiguous())
        return queries.contiguous(), latents, made[:, first_key:]


def _by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Returns the product `[T, H, M]` of each head's rows `[T, H, K]` with its own matrix,
    `[H, K, M]`."""
    by_head = F.pad(rows.transpose(0, 1), (0, 0, 0, -len(rows) % _ROW_MULTIPLE))
    return torch.bmm(by_head, matrices)[:, : len(rows)].transpose(0, 1)
