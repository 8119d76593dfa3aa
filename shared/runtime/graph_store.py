"""Graphs by what tells them apart, as many of them as there is memory for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import torch

from shared.runtime.shortage import Shortage

logger = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


class GraphStore(Generic[Key, Graph]):
    """Captures a graph when it is first asked for.

    Args:
        capture: makes one.
        is_shared: other processes capture the same one at the same time, and wait for this one in
            the middle of it.
        advise: says what to change for so much memory.

    Attributes:
        is_full: no memory is left for another one; those that are here go on.
    """

    def __init__(
        self,
        capture: Callable[[Key], Graph],
        *,
        is_shared: bool,
        advise: Callable[[Shortage], str],
    ) -> None:
        self.is_full = False
        self._capture = capture
        self._is_shared = is_shared
        self._advise = advise
        self._graphs: dict[Key, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def of(self, key: Key) -> Graph | None:
        """Returns a graph; None where there is no memory for it.

        Raises:
            RuntimeError: there is none, and others share the graph: going on without it
                would leave them waiting for ever.
        """
        if key not in self._graphs and not self.is_full:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                advice = self._advise(Shortage.of(error))
                if self._is_shared:
                    logger.critical(
                        "no memory for CUDA graph %d of the group: %s", len(self) + 1, advice
                    )
                    raise
                self._fill_up(advice)
        return self._graphs.get(key)

    def _fill_up(self, advice: str) -> None:
        self.is_full = True
        torch.cuda.empty_cache()
        logger.warning(
            "no memory for more than %d CUDA graphs; other steps run without: %s",
            *(len(self), advice),
        )
