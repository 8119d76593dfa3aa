"""Makes Triton's interpreter look up what never changes once a process.

The interpreter replaces the built-in functions of `triton.language` before each launch, and again
before each call of one kernel from another. Each time it lists every member of five modules and
classes to find them, which took a quarter of the time of the kernel tests. Which names are
built-in never changes, so this keeps the names. What is replaced, and by what, stays the same;
within a launch it has been replaced already.

For each operation it also makes a table anew of numpy's types; this keeps what it found in it. The
same for what follows from a shape alone: its sizes as constants, and whether a block may have it.

Of each sum and product of integers it computes whether it overflows, and then asserts nothing,
since it does not run in its debug mode; this leaves that out. So it does with broadcasts of blocks
that have the same shape already.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@functools.cache
def _names(package: Any) -> tuple[str, ...]:
    """Returns the names of the built-in functions of a module or class of `triton.language`.

    Only the interpreter replaces them, and it asks here first: none is replaced at the first call.
    """
    is_builtin = interpreter.tl.core.is_builtin
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


@functools.cache
def _told(member: Any) -> Any:
    """Returns a built-in function that is told what its operations mean: those of numpy."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Does what the interpreter's function of the same name does."""
    for name in _names(package):
        member = getattr(package, name)
        # A launch has replaced them already when one kernel calls another.
        if interpreter.tl.core.is_builtin(member):
            scope.set_attr(package, name, _told(member))


@functools.cache
def _languages(fn: Any) -> list[Any]:
    """Returns the modules of Triton's language that a kernel sees."""
    modules = interpreter.tl, interpreter.tl.core
    return [each for each in modules if any(each is seen for seen in fn.__globals__.values())]


_patch_lang_anew = interpreter._patch_lang


def _patch_lang(fn: Any) -> Any:
    """Does what the interpreter's function of the same name does, once a launch."""
    # What a launch has replaced, it puts back at its end.
    if any(interpreter.tl.core.is_builtin(each.load) for each in _languages(fn)):
        return _patch_lang_anew(fn)
    return interpreter._LangPatchScope()


_new_block_type = interpreter.tl.block_type.__init__


@functools.cache
def _block_sizes(shape: tuple[Any, ...]) -> tuple[tuple[int, ...], int]:
    """Returns a shape without its constants, and the number of its elements.

    Raises:
        TypeError, ValueError: no block may have it.
    """
    block = _Block()
    _new_block_type(block, interpreter.tl.int1, list(shape))
    return block.shape, block.numel


class _Block:
    """Takes what a type of blocks is told."""

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


_broadcast_anew = TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Does what the method `broadcast_impl_value` does."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
        return lhs, rhs
    found: tuple[Any, Any] = _broadcast_anew(self, lhs, rhs)
    return found


_of_numpy = functools.cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: Any) -> Any:
    """Does what the interpreter's function of the same name does."""
    scalar = dtype.scalar  # that of a block is its elements'
    if isinstance(scalar, interpreter.tl.pointer_type):
        return np.dtype(np.uint64)
    return _of_numpy(scalar)


def look_up_once() -> None:
    """Puts faster functions in the place of the interpreter's, in this process."""
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
