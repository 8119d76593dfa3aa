"""Pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gateway.responses.store import Item
from shared.errors import InvalidArgument

Order = Literal["asc", "desc"]


def item_list(items: Sequence[Item], after: str | None, limit: int, order: Order) -> dict[str, Any]:
    """Returns a page of items that are given oldest first.

    Raises:
        InvalidArgument: none of them has the id `after`.
    """
    ordered = list(items if order == "asc" else reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            message = f"after is {after[:128]!r}; no item has that id"
            raise InvalidArgument.of("FIELD_INVALID", "after", message)
        start = ids.index(after) + 1
    return listed(ordered[start:], limit)


def listed(found: Sequence[Item], limit: int) -> dict[str, Any]:
    """Returns the page that some items begin with."""
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
