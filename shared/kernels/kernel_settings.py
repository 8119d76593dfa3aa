"""Dispatch between Triton's kernels and plain torch: kernels run on CUDA, or in Triton's
interpreter with `TRITON_INTERPRET=1`.

The interpreter computes a kernel's programs one after another with numpy. That is far too slow to
serve, but it tests the kernels without a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

# Triton itself reads the variable when a kernel is defined.
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels compute with `tensor`, rather than plain torch."""
    return tensor.is_cuda or IS_INTERPRETING


def has_triton(device: torch.device) -> bool:
    """Whether kernels run on `device`."""
    return device.type == "cuda" or IS_INTERPRETING


class Dispatched(Generic[_Params, _Result]):
    """A computation with a Triton and a plain torch version. The device of the first argument, a
    tensor or `Partials`, decides which one runs.

    Args:
        module: module of `shared.kernels` with the Triton version, imported when it is first
            needed, because Triton is only installed with CUDA. Its function has the name of the
            plain one after `fused_`, and the same arguments and result.

    Attributes:
        plain: the plain torch version, for any device; the kernels' test oracle.
    """

    def __init__(self, plain: Callable[_Params, _Result], module: str) -> None:
        functools.update_wrapper(self, plain)
        self.plain, self._module = plain, f"shared.kernels.{module}"

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        first: Any = args[0]
        compute = self._fused if runs_triton(first) else self.plain
        return compute(*args, **kwargs)

    @functools.cached_property
    def _fused(self) -> Callable[_Params, _Result]:
        fused: Callable[_Params, _Result] = getattr(
            import_module(self._module), f"fused_{self.plain.__name__}"
        )
        return fused


def dispatched(
    module: str,
) -> Callable[[Callable[_Params, _Result]], Dispatched[_Params, _Result]]:
    """Decorates the plain version of a computation, see `Dispatched`."""
    return functools.partial(Dispatched, module=module)
