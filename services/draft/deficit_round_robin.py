"""Shares the draft's work among its targets: deficit round robin over links. No torch.

Source: Shreedhar and Varghese, Efficient fair queuing using deficit round robin, 1996.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.draft.sequence import DraftSequence


class DeficitRoundRobin:
    """Picks sequences link by link, so that each link with work gets as many tokens as another.

    Args:
        quantum: tokens a link earns with each turn.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._deficits: dict[int, int] = {}
        self._last: int | None = None

    def pick(
        self,
        sequences: Iterable[DraftSequence],
        cost: Callable[[DraftSequence], int],
        budget: int,
    ) -> list[DraftSequence]:
        """Returns sequences whose costs reach the budget, or all of them where they do not.

        Within a link the order stays. What is left over is for the next call, which begins with
        the link whose turn it then is.

        Args:
            cost: in tokens, at least 1.
        """
        queues = _by_link(sequences)
        self._deficits = {link: self._deficits.get(link, 0) for link in queues}
        if len(queues) == 1:
            return _until(next(iter(queues.values())), cost, budget)
        picked: list[DraftSequence] = []
        while queues and budget > 0:
            link = self._next(queues)
            budget -= self._serve(queues[link], link, picked, cost, budget)
            if not queues[link]:
                # A link without work saves nothing up.
                del queues[link], self._deficits[link]
        return picked

    def _next(self, queues: dict[int, list[DraftSequence]]) -> int:
        """Returns the link after the last one, round and round; its turn begins."""
        after = [link for link in queues if self._last is not None and link > self._last]
        self._last = min(after or queues)
        self._deficits[self._last] += self._quantum
        return self._last

    def _serve(
        self,
        queue: list[DraftSequence],
        link: int,
        picked: list[DraftSequence],
        cost: Callable[[DraftSequence], int],
        budget: int,
    ) -> int:
        """Moves what the link can pay for; returns the cost."""
        spent = 0
        while queue and spent < budget and cost(queue[0]) <= self._deficits[link]:
            sequence = queue.pop(0)
            self._deficits[link] -= cost(sequence)
            spent += cost(sequence)
            picked.append(sequence)
        return spent


def _by_link(sequences: Iterable[DraftSequence]) -> dict[int, list[DraftSequence]]:
    queues: dict[int, list[DraftSequence]] = {}
    for sequence in sequences:
        queues.setdefault(sequence.key.link, []).append(sequence)
    return queues


def _until(
    queue: list[DraftSequence], cost: Callable[[DraftSequence], int], budget: int
) -> list[DraftSequence]:
    picked: list[DraftSequence] = []
    for sequence in queue:
        if budget <= 0:
            break
        budget -= cost(sequence)
        picked.append(sequence)
    return picked
