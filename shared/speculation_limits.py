"""Limits of the numbers in a request's `speculation`, the same in JSON and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class IntegerLimit:
    """The range of one optional field.

    Attributes:
        field: its name in JSON, which errors of the target use as well.
        lowest, highest: inclusive.
    """

    field: str
    lowest: int
    highest: int

    def checked(self, value: int | None) -> int | None:
        """Returns the value; None where the request has none.

        Raises:
            InvalidArgument: the value is out of range.
        """
        if value is not None and not self.lowest <= value <= self.highest:
            limits = f"[{self.lowest}, {self.highest}]"
            raise InvalidArgument.out_of_range(self.field, value, limits)
        return value


TREE_STEPS = IntegerLimit("speculation.num_steps", 1, 32)
"""Depth of trees."""
TREE_TOKENS = IntegerLimit("speculation.num_draft_tokens", 1, 257)
"""Most rows of a verified tree, root included."""
OUTCOMES = IntegerLimit("speculation.outcome_budget", 0, 64)
"""Most outcomes for which a draft prepares trees ahead."""
