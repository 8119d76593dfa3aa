"""The floors of forwards and rounds of wide models: what the hardware allows, in the same run.

The matrix products of a forward alone, in one CUDA graph, or the bytes of 8-bit weights over the
copy bandwidth, plus the bytes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.quantised import QuantisedWeight
from shared.layers.linear import linears
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape
from tests.bench.device_clock import copy_bandwidth, device_ms


class WideFloors:
    """Floors in ms; 0 without a GPU to measure them on.

    Args:
        context_tokens: of every sequence.

    Attributes:
        bandwidth: bytes a ms of a large copy, read and written; 0 without a GPU.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, context_tokens: int) -> None:
        self._device, self._dtype, self._context_tokens = device, dtype, context_tokens
        self._has_gpu = device.type == "cuda"
        self.bandwidth = copy_bandwidth() if self._has_gpu else 0.0

    def step_ms(self, runner: ModelRunner, batch: int, shape: TreeShape | None) -> float:
        """Returns the floor of a forward of a target: plain, or verification of such trees."""
        if not self._has_gpu:
            return 0.0
        num_rows = batch * (1 if shape is None else shape.num_draft_tokens)
        kv_bytes = runner.pool.layout.token_size_bytes * self._context_tokens * batch
        return self._products_ms(runner.decoder, num_rows) + kv_bytes / self.bandwidth

    def draft_ms(self, model: Decoder | DraftHead, batch: int, shape: TreeShape) -> float:
        """Returns the floor of growing such trees."""
        if not self._has_gpu:
            return 0.0
        return shape.num_steps * self._products_ms(model, batch * shape.topk)

    def _products_ms(self, model: Decoder | DraftHead, num_rows: int) -> float:
        weights = [layer.weight for layer in linears(model)]
        narrow = [each for each in weights if isinstance(each, QuantisedWeight)]
        wide = [each.values for each in weights if not isinstance(each, QuantisedWeight)]
        inputs = {
            width: torch.randn(num_rows, width, device=self._device).to(self._dtype)
            for width in {values.shape[1] for values in wide}
        }
        bytes_ms = sum(each.values.nbytes for each in narrow) / self.bandwidth
        return bytes_ms + _graph_ms(wide, inputs)


def mean_floor_ms(
    num_steps: Mapping[TreeShape | None, int], floor_ms: Callable[[TreeShape | None], float]
) -> float:
    """Returns the mean floor of steps of several shapes.

    Args:
        num_steps: of each shape that ran; None are plain steps.
    """
    whole_ms = sum(count * floor_ms(shape) for shape, count in num_steps.items())
    return whole_ms / sum(num_steps.values())


def _graph_ms(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    def products() -> None:
        for values in weights:
            F.linear(inputs[values.shape[1]], values)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return device_ms(graph.replay, repeats=5)
