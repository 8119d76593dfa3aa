"""Makes Triton's interpreter look up what never changes once a process.

The interpreter replaces the built-in functions of `triton.language` before each launch, and again
before each call of one kernel from another. Each time it lists every member of five modules and
classes to find them, which took a quarter of the time of the kernel tests. Which names are
built-in never changes, so this keeps the names. What is replaced, and by what, stays the same.

For each operation it also makes a table anew of numpy's types; this keeps what it found in it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
from triton.runtime import interpreter


@functools.cache
def _names(package: Any) -> tuple[str, ...]:
    """Returns the names of the built-in functions of a module or class of `triton.language`.

    Only the interpreter replaces them, and it asks here first: none is replaced at the first call.
    """
    is_builtin = interpreter.tl.core.is_builtin
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Does what the interpreter's function of the same name does."""
    for name in _names(package):
        member = getattr(package, name)
        # A launch has replaced them already when one kernel calls another.
        if interpreter.tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


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
    interpreter._get_np_dtype = _get_np_dtype
