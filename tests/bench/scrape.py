"""What a scrape of a target's or a draft's metrics says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_HIT = re.compile(r'outrider_target_lookahead_hits_total\{position="([^"]*)",rank="([^"]*)"\}')
_MISS = re.compile(r'outrider_target_lookahead_misses_total\{position="([^"]*)"\}')


def add_counters(totals: dict[str, float], text: str) -> None:
    """Adds the values of a page of metrics, by name with and without their labels; the one without
    is the sum over them."""
    for line in text.splitlines():
        if line.startswith("outrider_"):
            full_name, value = line.rsplit(" ", 1)
            for name in {full_name, full_name.partition("{")[0]}:
                totals[name] = totals.get(name, 0.0) + float(value)


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Verdicts on trees by what had been prepared, as their labels call positions and ranks.

    Attributes:
        hits: by (position, rank).
        misses: by position.
    """

    hits: Mapping[tuple[str, str], int]
    misses: Mapping[str, int]

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> Lookahead:
        """Reads gains of a target's counters."""
        hits: Counter[tuple[str, str]] = Counter()
        misses: Counter[str] = Counter()
        for name, value in counters.items():
            if (hit := _HIT.fullmatch(name)) and value:
                hits[hit[1], hit[2]] += round(value)
            elif (miss := _MISS.fullmatch(name)) and value:
                misses[miss[1]] += round(value)
        return cls(hits, misses)

    @property
    def positions(self) -> list[str]:
        """In ascending order; the one that stands for all larger ones comes last."""
        return sorted({position for position, _ in self.hits} | set(self.misses), key=_order)

    @property
    def ranks(self) -> list[str]:
        """Likewise."""
        return sorted({rank for _, rank in self.hits}, key=_order)


def _order(label: str) -> tuple[int, str]:
    return len(label), label
