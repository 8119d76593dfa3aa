"""Self-attention whose keys and values are made of one narrow vector a token (MLA).

The cache holds that vector, and beside it a rotated key that all heads share. What expands it into
a head's keys is multiplied into the queries instead, and what expands it into values into the
result, so that all heads attend to the same rows of the cache and a token takes one row.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shared.kernels.attention import AttentionPlan, paged_attention
from shared.kernels.latent import LatentPlan, absorbed_queries, enter, expanded_values
from shared.kernels.pointwise import Partials, rotate
from shared.layers.attention import AttentionShape, ForwardContext
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part


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

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`; writes the rows' latent vectors and keys to the pool."""
        return self.output(self._attended(hidden, context), context.own)

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        return self.output.part(self._attended(hidden, context), context.own)

    def _attended(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns `[R, num_heads * V]`, of the rows that this process attends from."""
        hidden = context.taken(hidden)
        tables = context.tables_of(self.shape)
        cache = context.pool.keys[self.layer]
        queries = self._entered(hidden, tables, cache, context.batch.slots)
        plan = context.plans[self.shape.sliding_window]
        if isinstance(plan, LatentPlan) and plan.prompts is not None:
            return self._expanded(queries, tables, cache, plan).flatten(1)
        return self._absorbed(queries, tables, cache, plan).flatten(1)

    def _entered(
        self, hidden: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Writes the rows' latent vectors and keys to the cache; returns queries before rotation,
        `[T, H, N + R]`."""
        latent_norm = self.latent_norm.weight, self.latent_norm.eps
        if self.queries is None:
            made = self.compress(hidden)
            enter(made, None, latent_norm, tables, cache, slots)
            queries = made[:, : -self.shape.head_dim]
        else:
            assert self.query_norm is not None
            query_norm = self.query_norm.weight, self.query_norm.eps
            normed = enter(
                self.compress.partials(hidden), query_norm, latent_norm, tables, cache, slots
            )
            assert normed is not None
            queries = self.queries(normed)
        return queries.view(len(hidden), self.shape.num_heads, -1)

    def _absorbed(
        self,
        queries: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """Returns `[T, H, V]` with the expansion of keys multiplied into queries, and that of
        values into results."""
        assert self.shape.scale is not None
        attended = paged_attention(
            absorbed_queries(queries, self.key_up, tables),
            cache,
            cache,
            plan,
            scale=self.shape.scale,
            value_dim=self.key_up.shape[2],
        )
        return expanded_values(attended, self.value_up)

    def _expanded(
        self, queries: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, plan: LatentPlan
    ) -> Tensor:
        """Returns `[T, H, V]` with keys and values of prompts expanded: less arithmetic, where
        many rows share them."""
        from shared.kernels.attention_prompts_triton import expanded_attention

        assert self.shape.scale is not None
        assert plan.prompts is not None
        straight_dim, value_dim = self.key_up.shape[1], self.value_up.shape[1]
        results = plan.results(queries, value_dim)
        cos, signed_sin = tables
        own_tables = plan.taken(cos), plan.taken(signed_sin)
        own = replace(plan, prompts=None)
        plan.put(results, self._absorbed(plan.taken(queries), own_tables, cache, own))
        turned = queries[..., straight_dim:]
        turned.copy_(rotate(turned, *tables))
        expanded_attention(
            queries, cache, self.key_up, self.value_up, results, plan.prompts,
            scale=self.shape.scale,
        )  # fmt: skip
        return results[:-1]
