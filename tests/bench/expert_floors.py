"""What a forward of a mixture of experts has to read and to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.layers.experts import Experts, Router
from shared.layers.tensor_group import TensorGroup
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import MtpLayer


@dataclass(frozen=True, slots=True)
class StepFloor:
    """What a step of the target costs at least.

    Attributes:
        hits: experts of a layer that its rows choose, on average.
        expected_hits: that rows choose which know nothing of each other.
    """

    ms: float
    hits: float
    expected_hits: float


@dataclass(frozen=True, slots=True)
class CountingRouter(Router):
    """Notes how many experts each call chooses."""

    counts: list[int] = field(default_factory=list)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # A slotted dataclass is made anew, which `super` without arguments does not know.
        weights, experts = Router.__call__(self, hidden)
        self.counts.append(len(torch.unique(experts)))
        return weights, experts


@torch.inference_mode()
def experts_hit(decoder: Decoder, pool: KvPool, batch: ForwardBatch) -> list[int]:
    """Returns how many experts of each layer that has some compute a row of `batch`."""
    counts: list[int] = []

    def watched(experts: Experts) -> Experts:
        own = experts.router
        router = CountingRouter(own.weight, own.correction, own.routing, own.is_wide, counts)
        return replace(experts, router=router)

    layers = tuple(
        replace(layer, mlp=watched(layer.mlp)) if isinstance(layer.mlp, Experts) else layer
        for layer in decoder.layers
    )
    with pool.advancing(batch) as plan:
        states = None if plan is None else plan.upload(pool.device)
        replace(decoder, layers=layers).forward(batch, pool, states=states)
    return counts


def expected_hits(num_experts: int, num_chosen: int, num_rows: float) -> float:
    """Returns how many experts rows choose that know nothing of each other."""
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_rows)


def weight_bytes(decoder: Decoder, hits: Sequence[float]) -> float:
    """Returns the bytes of weights that a forward reads, which hits so many experts a layer."""
    return _total(decoder, hits, lambda tensor: tensor.nbytes)


def level_bytes(head: DraftHead, hits: float) -> float:
    """Returns the bytes of weights that a pass of a next-token layer reads, which hits so many
    experts, the lm_head's included."""
    layer = head.layers[0]
    assert isinstance(layer, MtpLayer)
    own = sum(tensor.nbytes for tensor in tensors_of((layer, head.vocabulary.lm_head)))
    return own + _unread(layer.block.mlp, hits, lambda tensor: tensor.nbytes)


def weights_a_row(decoder: Decoder) -> float:
    """Returns how many weights multiply one row, the lm_head's left out; where experts are spread,
    of those here on average."""
    experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]
    chosen = [
        each.router.routing.num_chosen * each.gate_up.num_experts / each.router.routing.num_experts
        for each in experts
    ]
    head = sum(tensor.numel() for tensor in tensors_of(decoder.lm_head))
    return _total(decoder, chosen, Tensor.numel) - head


def attention_weights(decoder: Decoder) -> int:
    """Returns how many of them are those of attention, of all layers."""
    return sum(each.numel() for layer in decoder.layers for each in tensors_of(layer.attention))


def _total(decoder: Decoder, hits: Sequence[float], size: Callable[[Tensor], int]) -> float:
    remaining = iter(hits)
    total = float(sum(map(size, tensors_of(decoder.lm_head))))
    for layer in decoder.layers:
        total += sum(map(size, tensors_of(layer)))
        if isinstance(layer.mlp, Experts):
            total += _unread(layer.mlp, next(remaining), size)
    return total


def _unread(mlp: object, hits: float, size: Callable[[Tensor], int]) -> float:
    """Returns what the experts that are not hit take off the size of a layer, below 0."""
    assert isinstance(mlp, Experts)
    experts = sum(map(size, tensors_of((mlp.gate_up, mlp.down))))
    return experts * (hits / mlp.gate_up.num_experts - 1.0)


def tensors_of(part: object) -> Iterator[Tensor]:
    """Yields the weights that a part of a decoder holds; memory for sums over GPUs is none."""
    if isinstance(part, TensorGroup):
        return
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors_of(each)
    elif is_dataclass(part):
        for own in fields(part):
            yield from tensors_of(getattr(part, own.name))
