"""A long history made short: the user's messages, and the model's own summary of everything."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Sequence

from gateway.responses.schema import InputItem
from gateway.responses.store import Item
from gateway.responses.stored_items import stored_items
from shared.errors import InvalidArgument

COMPACTIONS = frozenset({"compaction", "compaction_summary"})
REQUEST = (
    "Summarize the conversation so far for whoever continues it: the task, what has been done and "
    "found, decisions, names of files and values that are still needed, and what is left to do."
)
_MARK = b"outrider:summary:"


def compacted(items: Sequence[InputItem], summary: str) -> list[Item]:
    """Returns the items that stand for a history. The summary is encoded, not encrypted: it is the
    client's own text."""
    users = [item for item in items if item.type == "message" and item.role == "user"]
    content = base64.b64encode(_MARK + summary.encode()).decode()
    item_id = f"cmp_{uuid.uuid4().hex}"
    return [
        *stored_items(users),
        {"id": item_id, "type": "compaction", "encrypted_content": content},
    ]


def summary_of(field: str, item: InputItem) -> str:
    """Raises:
    InvalidArgument: it is no compaction of this program's making.
    """
    try:
        content = base64.b64decode(item.encrypted_content or "", validate=True)
        if content.startswith(_MARK):
            return content.removeprefix(_MARK).decode()
    except (binascii.Error, ValueError):  # of bytes that are no UTF-8 as well
        pass
    field = f"{field}.encrypted_content"
    message = f"{field} is not what /v1/responses/compact of this gateway returns"
    raise InvalidArgument.of("FIELD_INVALID", field, message)
