"""Arguments that do not come as JSON, written as a JSON object while they stream."""

from __future__ import annotations

import json

from gateway.output.reader import Emit


class ArgumentWriter:
    """Writes one object, key by key. One that `end` never closed was cut off or garbled."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_keys = False

    def key(self, name: str) -> None:
        """Writes a key; its value comes next."""
        lead = ", " if self._has_keys else "{"
        self._has_keys = True
        self._emit(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")

    def value(self, written: str) -> None:
        """Writes JSON, or a piece of it."""
        self._emit(written)

    def text(self, piece: str) -> None:
        """Writes a piece of a string, between quotes that the caller writes."""
        self._emit(json.dumps(piece, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._emit("}" if self._has_keys else "{}")
