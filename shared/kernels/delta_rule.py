"""The gated delta rule of linear attention, token by token or in chunks.

A token's result must not depend on the rest of the batch: with drafts, the same token is computed
alone, in a tree or again from stored inputs. So every sum of `delta_scan` has one order for all
shapes, and functions whose last bits depend on an element's position in a tensor are computed in
float64 and rounded once. `delta_chunk`, for prompts, always has the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
CHUNK = 64
"""Most tokens of a call of `delta_chunk`."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a layer.

    Attributes:
        num_key_heads: heads of queries and keys; each is shared by neighbouring value heads.
        num_value_heads: heads of values, and of the state.
        window: tokens that the convolution sees, the token's own included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_value_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """Stored inputs per token: the channels, then update and decay of each value head."""
        return self.num_channels + 2 * self.num_value_heads

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of the recurrence.

    Attributes:
        taps: `[num_channels, window]`, the own token last.
        log_decay: `[num_value_heads]` float32, `A_log`.
        decay_bias: `[num_value_heads]` float32, `dt_bias`.
    """

    taps: Tensor
    log_decay: Tensor
    decay_bias: Tensor


def delta_scan(
    inputs: Tensor, is_there: Tensor, state: Tensor, shape: DeltaShape, weights: DeltaWeights
) -> tuple[Tensor, Tensor]:
    """Advances N states by up to M tokens each.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.

    Args:
        inputs: `[N, window - 1 + M, num_inputs]`, of the `window - 1` tokens before, then of the M.
        is_there: `[N, window - 1 + M]` bool; a missing token does not change the state, and its
            channels count as zeros.
        state: `[N, num_value_heads, key_dim, value_dim]` float32.

    Returns:
        The new states, and each token's result, `[N, M, num_value_heads, value_dim]` float32.
    """
    history = shape.window - 1
    num_tokens = inputs.shape[1] - history
    queries, keys, values = _convolved(inputs, is_there, shape, weights)
    update, log_decay = _gates(inputs[:, history:], shape, weights)
    decay = log_decay.exp().float()
    read = torch.empty_like(values)
    for token in range(num_tokens):
        key = keys[:, token].unsqueeze(3)
        decayed = state * decay[:, token].unsqueeze(2).unsqueeze(3)
        error = values[:, token] - _sum_halves(decayed * key)
        error = error * update[:, token].unsqueeze(2)
        updated = decayed + key * error.unsqueeze(2)
        read[:, token] = _sum_halves(updated * queries[:, token].unsqueeze(3))
        state = torch.where(is_there[:, history + token, None, None, None], updated, state)
    return state, read


def delta_chunk(
    inputs: Tensor, is_there: Tensor, state: Tensor, shape: DeltaShape, weights: DeltaWeights
) -> tuple[Tensor, Tensor]:
    """As `delta_scan`, for one state and up to `CHUNK` tokens, with matrix products.

    Token i adds `key_i error_i^T` to the state, where `error_i` depends on the errors before it:
    the errors are the solution of a unit lower triangular system.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3; Yang et al., DeltaNet,
    arXiv 2406.06484, section 3.2.

    Args:
        inputs: `[window - 1 + CHUNK, num_inputs]`.
        is_there: `[window - 1 + CHUNK]` bool.
        state: `[num_value_heads, key_dim, value_dim]` float32.

    Returns:
        The new state, and each token's result, `[CHUNK, num_value_heads, value_dim]` float32.
    """
    history = shape.window - 1
    convolved = _convolved(inputs[None], is_there[None], shape, weights)
    queries, keys, values = (heads[0].transpose(0, 1) for heads in convolved)
    update, log_decay = (gates.T for gates in _gates(inputs[history:], shape, weights))
    # A missing token neither updates nor decays the state.
    update = torch.where(is_there[history:], update, 0.0).unsqueeze(2)
    total = torch.where(is_there[history:], log_decay, 0.0).cumsum(1)
    since_begin = total.exp().float().unsqueeze(2)
    to_end = (total[:, -1:] - total).exp().float().unsqueeze(2)
    # [H, i, j]: the decay at token i of what token j added.
    between = (total.unsqueeze(2) - total.unsqueeze(1)).exp().float().tril()
    system = (update * between * (keys @ keys.mT)).tril(-1)
    wanted = update * (values - since_begin * (keys @ state))
    errors = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = since_begin * (queries @ state) + (between * (queries @ keys.mT)) @ errors
    state = since_begin[:, -1:] * state + (keys * to_end).mT @ errors
    return state, read.transpose(0, 1)


def batch_invariant_sigmoid(values: Tensor) -> Tensor:
    """Returns sigmoids in float32, computed in float64: on a CPU torch computes the last elements
    of a tensor by another method, and the difference is lost in rounding."""
    return values.double().sigmoid().float()


def batch_invariant_silu(values: Tensor) -> Tensor:
    """Returns `values * sigmoid(values)` in float32, see `batch_invariant_sigmoid`."""
    wide = values.double()
    return (wide * wide.sigmoid()).float()


def _convolved(
    inputs: Tensor, is_there: Tensor, shape: DeltaShape, weights: DeltaWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values `[N, M, num_value_heads, ...]` float32."""
    num_tokens = inputs.shape[1] - shape.window + 1
    channels = inputs[..., : shape.num_channels].float()
    channels = torch.where(is_there.unsqueeze(2), channels, 0.0)
    taps = weights.taps.float()
    mixed = channels[:, :num_tokens] * taps[:, 0]
    for tap in range(1, shape.window):
        mixed = mixed + channels[:, tap : tap + num_tokens] * taps[:, tap]
    mixed, lanes = batch_invariant_silu(mixed), mixed.shape[:2]
    num_keys = shape.num_key_heads * shape.key_dim
    queries, keys = (
        _normalise(part.view(*lanes, shape.num_key_heads, shape.key_dim)).repeat_interleave(
            shape.num_value_heads // shape.num_key_heads, dim=2
        )
        for part in (mixed[..., :num_keys], mixed[..., num_keys : 2 * num_keys])
    )
    values = mixed[..., 2 * num_keys :].view(*lanes, shape.num_value_heads, shape.value_dim)
    return queries * shape.key_dim**-0.5, keys, values


def _gates(inputs: Tensor, shape: DeltaShape, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Returns a token's update gate in float32, and the logarithm of its decay of the state in
    float64, `[..., num_value_heads]` each."""
    first, count = shape.num_channels, shape.num_value_heads
    update = batch_invariant_sigmoid(inputs[..., first : first + count])
    rates = inputs[..., first + count : first + 2 * count].double()
    rates = torch.nn.functional.softplus(rates + weights.decay_bias.double())
    return update, -weights.log_decay.double().exp() * rates


def _normalise(vectors: Tensor) -> Tensor:
    """Returns vectors `[..., D]` scaled to length 1."""
    squares = _sum_halves((vectors * vectors).unsqueeze(-1))
    return vectors / (squares + EPS).sqrt()


def _sum_halves(rows: Tensor) -> Tensor:
    """Returns the sum `[..., C]` of `[..., R, C]` over R, always adding one half to the other."""
    while (count := rows.shape[-2]) > 1:
        half = count // 2
        added = rows[..., :half, :] + rows[..., half : 2 * half, :]
        rows = added if count % 2 == 0 else torch.cat((added, rows[..., -1:, :]), dim=-2)
    return rows[..., 0, :]
