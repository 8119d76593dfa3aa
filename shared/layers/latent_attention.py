"""Multi-head latent attention (MLA): keys and values are made of one narrow vector per token.

The cache holds this latent vector, and next to it a rotated key that all heads share. The matrix
that expands the latent vector into a head's keys is multiplied into the queries instead, and the
one that expands it into values is applied to the result. So all heads attend to the same rows of
the cache, one per token.

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
        query_norm: norm of the compressed queries; None where `compress` returns full queries.
        queries: compressed queries to `num_heads` queries, each an unrotated part and a rotated
            one; None where `query_norm` is.
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
        return self.output(self._attend(hidden, context), context.own)

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        return self.output.part(self._attend(hidden, context), context.own)

    def _attend(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns `[R, num_heads * V]` for the rows that this process attends from."""
        hidden = context.own_rows(hidden)
        tables = context.tables_of(self.shape)
        cache = context.pool.keys[self.layer]
        queries = self._store(hidden, tables, cache, context.batch.slots)
        plan = context.plans[self.shape.sliding_window]
        if isinstance(plan, LatentPlan) and plan.prompts is not None:
            return self._attend_expanded(queries, tables, cache, plan).flatten(1)
        return self._attend_absorbed(queries, tables, cache, plan).flatten(1)

    def _store(
        self, hidden: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Writes the rows' latent vectors and keys to the cache; returns queries before rotation,
        `[T, H, N + R]`."""
        latent_norm = self.latent_norm.weight, self.latent_norm.eps
        if self.queries is None:
            projected = self.compress(hidden)
            enter(projected, None, latent_norm, tables, cache, slots)
            queries = projected[:, : -self.shape.head_dim]
        else:
            assert self.query_norm is not None
            query_norm = self.query_norm.weight, self.query_norm.eps
            normed = enter(
                self.compress.partials(hidden), query_norm, latent_norm, tables, cache, slots
            )
            assert normed is not None
            queries = self.queries(normed)
        return queries.view(len(hidden), self.shape.num_heads, -1)

    def _attend_absorbed(
        self,
        queries: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """Returns `[T, H, V]`, attending to latent vectors: the expansion of keys is multiplied
        into the queries, and that of values into the results."""
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

    def _attend_expanded(
        self, queries: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, plan: LatentPlan
    ) -> Tensor:
        """Returns `[T, H, V]`, with the keys and values of prompts expanded: less arithmetic where
        many rows share them."""
        from shared.kernels.attention_prompts_triton import expanded_attention

        assert self.shape.scale is not None
        assert plan.prompts is not None
        unrotated_dim, value_dim = self.key_up.shape[1], self.value_up.shape[1]
        results = plan.results(queries, value_dim)
        cos, signed_sin = tables
        plain_tables = plan.select(cos), plan.select(signed_sin)
        attended = self._attend_absorbed(
            plan.select(queries), plain_tables, cache, replace(plan, prompts=None)
        )
        plan.scatter_into(results, attended)
        rotated = queries[..., unrotated_dim:]
        rotated.copy_(rotate(rotated, *tables))
        expanded_attention(
            queries, cache, self.key_up, self.value_up, results, plan.prompts,
            scale=self.shape.scale,
        )  # fmt: skip
        return results[:-1]
