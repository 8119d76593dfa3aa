"""Small operations of a layer: activation, norm, rotation, embeddings, the input of a draft head.
One fused kernel each on CUDA, plain torch elsewhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.kernel_settings import dispatched, runs_triton

# Products whose parts are added by the next kernel.
#
# A product of few rows is cut along its depth, so that enough programs read the weight. The next
# kernel reads the result anyway; if it adds the parts, no separate reduction kernel is needed.
#
# Source: split-K with a fused reduction, as in stream-K, Osama et al., arXiv 2301.03598, section 3.


@dataclass(frozen=True, slots=True)
class Partials:
    """A tensor `[T, ...]` that is the sum of its parts.

    Attributes:
        parts: `[S, T, ...]` float32, contiguous, to be added in order, starting from zero.
        dtype: dtype to which the sum is rounded.
    """

    parts: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the sum."""
        return self.parts.shape[1:]

    @property
    def is_cuda(self) -> bool:
        return self.parts.is_cuda

    def view(self, *shape: int) -> Partials:
        """Returns the same sum in another shape."""
        return Partials(self.parts.view(len(self.parts), *shape), self.dtype)

    def total(self) -> Tensor:

        total = torch.zeros_like(self.parts[0])
        for part in self.parts:
            total += part
        return total.to(self.dtype)


def total_of(tensor: Tensor | Partials) -> Tensor:
    """Returns the sum of `Partials`, or a tensor as it is."""
    return tensor.total() if isinstance(tensor, Partials) else tensor


# Parameters of CLAMPED_SWIGLU.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

Norm = tuple[Tensor, float]


class Activation(enum.Enum):
    """The gate's activation in a feed-forward block, by its name in checkpoints."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns `activation(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first.

    CLAMPED_SWIGLU is gpt-oss's activation, in which `up` has an offset of 1.
    """
    if activation is Activation.SILU:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.GELU_TANH:
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))


def gated(values: Tensor, gate: Tensor) -> Tensor:
    """Returns `values` times the sigmoids of `gate`, which broadcasts against them."""
    # On a CPU in float64: torch computes a tensor's last elements by another method.
    wide = gate.double() if gate.device.type == "cpu" else gate.float()
    return values * wide.sigmoid().to(values.dtype)


def bounded_gate_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Returns `silu(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first. `silu(gate)` is
    clamped to at most `limit`, and `up` to `[-limit, limit]`, as in Step-3.5's last layers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


@dispatched("fused_triton")
def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first.

    Source: Shazeer, arXiv 2002.05202, equation 6 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last axis of `hidden` `[..., D]` to unit root mean square, times `weight`.

    Computes in float32, rounds to the dtype of `hidden`, applies the weight and rounds again. With
    a float32 weight, as in families whose weights have an offset, it only rounds at the end.
    `weight` broadcasts against `hidden`.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    if runs_triton(hidden) and weight.dim() == 1:
        return add_rms_norm(hidden, None, weight, eps)[1]
    return plain_rms_norm(hidden, weight, eps)


@dispatched("fused_triton")
def add_rms_norm(
    hidden: Tensor,
    update: Tensor | Partials | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `hidden + update` and its norm, both `[T, D]`; `weight` is `[D]`.

    Without an update the first result is `hidden` itself.

    Args:
        rows: `[T]` int64, the rows of `hidden` and `update` to compute; None takes all.
    """
    total = hidden if update is None else hidden + total_of(update)
    if rows is not None:
        total = total.index_select(0, rows)
    return total, plain_rms_norm(total, weight, eps)


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch, on any device; the kernel's test oracle."""
    wide = hidden.float()
    mean_square = (wide * wide).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square.add_(eps))
    if weight.dtype is not torch.float32:
        normed = normed.to(hidden.dtype)
    return (normed * weight).to(hidden.dtype)


@dispatched("fused_triton")
def own_embeddings(token_ids: Tensor, embedding: Tensor, first_token: int) -> Tensor:
    """Returns `[T, H]`: rows of `embedding` `[V, H]`, whose tokens begin at `first_token`, and
    zeros for tokens of other processes.

    Args:
        token_ids: `[T]` int64.
    """
    own_ids = token_ids - first_token
    is_own = (own_ids >= 0) & (own_ids < len(embedding))
    rows = F.embedding(own_ids.masked_fill(~is_own, 0), embedding)
    return rows.masked_fill(~is_own.unsqueeze(1), 0.0)


def embeddings(token_ids: Tensor, embedding: Tensor) -> Tensor:
    """Returns rows of `embedding` `[V, H]` for `token_ids` `[T]` int64, all below V."""
    if runs_triton(embedding) and embedding.is_contiguous() and token_ids.is_contiguous():
        return own_embeddings(token_ids, embedding, 0)
    return F.embedding(token_ids, embedding)


@dispatched("fused_triton")
def position_tables(
    positions: Tensor, frequencies: Tensor, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """Returns the rotation tables of positions, see `rotation_tables`.

    Args:
        positions: `[T]` int64.
        frequencies: `[D/2]` float32 radians per position, or `[T, D/2]`.
    """
    return rotation_tables(positions.unsqueeze(1) * frequencies, attention_factor)


def rotation_tables(angles: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Returns the cosine and signed sine tables `[T, 1, D]` for `angles` `[T, D/2]` float32.

    The sine of the first half is negated, so that a rotation is two products and one sum:
    `x * cos + swap_halves(x) * signed_sin`.
    """
    cos = angles.cos()
    sin = angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates `heads` `[T, H, D]` by tables `[T, 1, D]`, in float32, back in its own dtype.

    Source: Su et al., arXiv 2104.09864, equation 34, with dimensions i and i + D/2 as pairs.
    """
    wide = heads.float()
    swapped = wide.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, signed_sin).to(heads.dtype)


@dispatched("fused_triton")
def join_inputs(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    rows: Tensor | None,
    norms: tuple[Norm, Norm] | None,
    *,
    normed_residual: bool,
) -> tuple[Tensor, Tensor]:
    """Gathers, normalises and joins both halves of the input of a draft head.

    Args:
        token_ids: `[T]` int64.
        embedding: `[V, H]`.
        hidden: `[R, H]`.
        rows: `[T]` int64, the row of `hidden` that each row reads; None reads them in order.
        norms: weight `[H]` and eps of the norms of embedding and hidden state; None for no norms.
        normed_residual: the second result is the normalised hidden state.

    Returns:
        The joined rows `[T, 2H]`, embedding first, and the hidden states `[T, H]`.
    """
    embedded = F.embedding(token_ids, embedding)
    residual = hidden if rows is None else hidden.index_select(0, rows)
    normed = residual
    if norms is not None:
        first, second = norms
        embedded = plain_rms_norm(embedded, *first)
        normed = plain_rms_norm(residual, *second)
    joined = torch.cat((embedded, normed), dim=-1)
    return joined, normed if normed_residual else residual
