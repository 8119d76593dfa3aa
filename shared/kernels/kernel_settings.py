"""Where Triton's kernels compute, and where plain torch does: kernels run on CUDA, or in Triton's
interpreter where the environment asks for it.

The interpreter computes a kernel's programs one after the other with numpy: far too slow to serve,
and right to test the kernels where there is no GPU. `TRITON_INTERPRET=1` asks for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

# Triton reads the variable as well, when a kernel is defined.
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels take `tensor`, rather than plain torch."""
    return tensor.is_cuda or IS_INTERPRETING


def has_triton(device: torch.device) -> bool:
    """Whether kernels run on `device`."""
    return device.type == "cuda" or IS_INTERPRETING


class Dispatched(Generic[_Params, _Result]):
    """A computation by kernels where they take its first argument, a tensor that may be left in
    parts, and by plain torch elsewhere.

    Args:
        module: of `shared.kernels`, imported when it is first needed: Triton is not installed where
            there is no CUDA. Its function has the name of the plain one behind `fused_`, and the
            same arguments and result.

    Attributes:
        plain: the computation in plain torch, on any device: the kernels' oracle.
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
