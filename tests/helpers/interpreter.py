"""Makes Triton's interpreter faster by caching lookups whose results never change.

The interpreter replaces the built-in functions of `triton.language` before each launch, and again
before each call of one kernel from another. Each time it lists every member of five modules and
classes to find these functions, which took a quarter of the time of the kernel tests. The names of
built-in functions never change, so this module caches them. It replaces the same functions by the
same stand-ins, but only once a launch.

For each operation the interpreter also builds a table of numpy's types; this module caches the
lookups. It also caches what depends on a shape only: its sizes as constants, and whether a block
may have that shape.

Its conversion to e4m3 loses carries of the mantissa and does not break ties to even, as devices do;
this module uses torch's.

For each sum and product of integers the interpreter computes whether it overflows, but asserts
nothing outside its debug mode; this module skips that. It also skips broadcasts of blocks that
already have the same shape.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from shared.kernels.cache import LARGEST


@functools.cache
def _names(package: Any) -> tuple[str, ...]:
    """Returns the names of the built-in functions of a module or class of `triton.language`.

    Nothing is replaced yet at the first call: only the interpreter replaces functions, and it calls
    this first.
    """
    is_builtin = interpreter.tl.core.is_builtin
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


@functools.cache
def _interpreted(member: Any) -> Any:
    """Returns a built-in function bound to the interpreter's numpy semantics."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Does what the interpreter's function of the same name does."""
    for name in _names(package):
        member = getattr(package, name)
        # When one kernel calls another, the launch has already replaced the functions.
        if interpreter.tl.core.is_builtin(member):
            scope.set_attr(package, name, _interpreted(member))


@functools.cache
def _languages(fn: Any) -> list[Any]:
    """Returns the modules of Triton's language that a kernel sees."""
    modules = interpreter.tl, interpreter.tl.core
    return [module for module in modules if any(module is v for v in fn.__globals__.values())]


_original_patch_lang = interpreter._patch_lang


def _patch_lang(fn: Any) -> Any:
    """Does what the interpreter's function of the same name does, once a launch."""
    # A launch restores the functions at its end.
    if any(interpreter.tl.core.is_builtin(module.load) for module in _languages(fn)):
        return _original_patch_lang(fn)
    return interpreter._LangPatchScope()


_new_block_type = interpreter.tl.block_type.__init__


@functools.cache
def _block_sizes(shape: tuple[Any, ...]) -> tuple[tuple[int, ...], int]:
    """Returns a shape without its constants, and the number of its elements.

    Raises:
        TypeError, ValueError: no block may have this shape.
    """
    block = _Block()
    _new_block_type(block, interpreter.tl.int1, list(shape))
    return block.shape, block.numel


class _Block:
    """Holds the attributes that the constructor of a block type sets."""

    shape: tuple[int, ...]
    numel: int


def _block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """Does what the constructor of `triton.language.block_type` does."""
    self.element_ty = element_ty
    self.shape, self.numel = _block_sizes(tuple(shape))


def _block_name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the number of elements and the sizes of a tensor as constants."""
    constexpr = interpreter.tl.constexpr
    return constexpr(math.prod(shape)), interpreter.tl.tuple([constexpr(size) for size in shape])


def _tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
    """Does what the constructor of `triton.language.tensor` does."""
    self.handle = handle
    self.numel, self.shape = _constants(type.shape if type.is_block() else ())
    self.type = type
    self.dtype = type.scalar


_original_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Does what the method `broadcast_impl_value` does."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
        return lhs, rhs
    broadcast: tuple[Any, Any] = _original_broadcast(self, lhs, rhs)
    return broadcast


_np_dtype = functools.cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> Any:
    """Does what the interpreter's function of the same name does."""
    scalar = dtype.scalar  # of a block: the type of its elements
    if isinstance(scalar, interpreter.tl.pointer_type):
        return np.dtype(np.uint64)
    return _np_dtype(scalar)


_original_convert = interpreter._convert_float


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Does what the interpreter's `_convert_float` does, but rounds to e4m3 as devices do."""
    if target != interpreter.tl.float8e4nv or source != interpreter.tl.float32:
        return _original_convert(values, source, target, rounding_mode)
    numbers = torch.from_numpy(np.array(values, dtype=np.float32)).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def look_up_once() -> None:
    """Replaces functions of the interpreter by cached or better ones, in this process."""
    interpreter._convert_float = _convert
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.tl.block_type.__init__ = _block_type
    interpreter.tl.block_type.name = property(_block_name)
    interpreter.tl.tensor.__init__ = _tensor
    TritonSemantic.broadcast_impl_value = _broadcast
