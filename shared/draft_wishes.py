"""What a request may wish of drafts: the same limits in JSON and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Wish:
    """A whole number that a request may name.

    Attributes:
        field: as clients of the gateway spell it; errors of the target name it so, too.
        lowest, highest: inclusive.
    """

    field: str
    lowest: int
    highest: int

    def checked(self, value: int | None) -> int | None:
        """Returns the value; None is no wish.

        Raises:
            InvalidArgument: it is out of its range.
        """
        if value is not None and not self.lowest <= value <= self.highest:
            limits = f"[{self.lowest}, {self.highest}]"
            raise InvalidArgument.out_of_range(self.field, value, limits)
        return value


TREE_STEPS = Wish("speculation.num_steps", 1, 32)
"""Depth of trees."""
TREE_TOKENS = Wish("speculation.num_draft_tokens", 1, 257)
"""Rows of a tree that are verified at most, the root included."""
OUTCOMES = Wish("speculation.outcome_budget", 0, 64)
"""Verdicts that are prepared for at most."""
