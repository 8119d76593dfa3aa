"""The folder in which the workers of one gateway find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker among all of a gateway.

    Attributes:
        index: from 0.
        count: of the workers.
        folder: of their sockets, which only this user may enter.
    """

    index: int
    count: int
    folder: Path

    @property
    def http_path(self) -> Path:
        """The socket on which the worker answers the others."""
        return self.folder / f"{self.index}.http"

    @property
    def maintenance_address(self) -> str:
        return f"unix:{self.folder / str(self.index)}.maintenance"

    @property
    def others(self) -> list[WorkerPlace]:
        """The other workers."""
        places = (WorkerPlace(index, self.count, self.folder) for index in range(self.count))
        return [place for place in places if place.index != self.index]
