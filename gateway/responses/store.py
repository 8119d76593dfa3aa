"""Stored responses, conversations and chats, in SQLite: in memory, or in a file.

An entry belongs to the API key that made it; no other key can read it. The size limit is in bytes
of JSON. Above it, the oldest entry of the key that stores most is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import orjson

from gateway.responses.schema import InputItem
from shared.errors import InvalidArgument, NotFound, SettingsError, Unavailable

Item = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

MEMORY = ":memory:"
RESPONSE, CONVERSATION, CHAT = "resp_", "conv_", "chatcmpl-"  # prefixes of ids
_RUNNING = ("queued", "in_progress")
_LOCK_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, changed REAL NOT NULL, size INTEGER NOT NULL,
    previous TEXT, body TEXT NOT NULL, events BLOB);
CREATE INDEX IF NOT EXISTS entries_by_age ON entries (owner, changed);
CREATE INDEX IF NOT EXISTS entries_by_size ON entries (owner, size);
CREATE TABLE IF NOT EXISTS items (
    entry TEXT NOT NULL REFERENCES entries (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    id TEXT NOT NULL, is_output INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (entry, position));
CREATE INDEX IF NOT EXISTS items_by_id ON items (id);
"""
_CHAIN = """
WITH RECURSIVE chain (id, age) AS (
    SELECT ?, 0
    UNION ALL
    SELECT previous, age + 1 FROM entries JOIN chain USING (id)
    WHERE previous IS NOT NULL AND owner = ?)
SELECT chain.id, entries.size, json_extract(entries.body, '$.status')
FROM chain LEFT JOIN entries ON entries.id = chain.id AND entries.owner = ? ORDER BY age DESC
"""
_STOPPED = '{"code": "server_error", "message": "the gateway stopped before the response ended"}'

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is stored.

    Attributes:
        body: the JSON object that clients see.
        input: the input items of its own request, without the items of earlier responses.
        events: the events of its stream; None when they are not stored.
    """

    body: dict[str, Any]
    input: Sequence[Item] = ()
    events: Sequence[bytes] | None = None

    @property
    def response_id(self) -> str:
        return str(self.body["id"])

    @property
    def is_running(self) -> bool:
        return self.body["status"] in _RUNNING


def _on_thread(
    work: Callable[Concatenate[ResponseStore, P], T],
) -> Callable[Concatenate[ResponseStore, P], asyncio.Future[T]]:
    """Decorates a method of the store to run on the store's thread, in its own transaction."""

    @wraps(work)
    def begin(store: ResponseStore, /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return store.begin(partial(work, store, *args, **kwargs))

    return begin


def log_failure(write: asyncio.Future[None]) -> None:
    """Logs the error of a write to the store that nobody awaits, should it fail."""

    def log_error(done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            _log.error("a response was not stored: %s", error)

    write.add_done_callback(log_error)


class ResponseStore:
    """Stores entries. All database work runs on one thread of the store, in order.

    Args:
        path: a file, which no other gateway may have open; or `MEMORY`.
        now: the clock: returns Unix time in seconds.
        max_bytes: limit on the JSON of all entries.
        max_age_s: an entry is deleted so long after its last change.
        max_history_bytes: limit on the stored items that one request continues.
        is_shared: other workers have the file open; their responses that still run are left alone.

    Raises:
        SettingsError: the file cannot be used.
        NotFound (every method with an id): `owner` has stored nothing with this id.
    """

    def __init__(
        self,
        path: str = MEMORY,
        now: Callable[[], float] = time.time,
        *,
        max_bytes: int = 256 * 2**20,
        max_age_s: float = 30 * 24 * 3600.0,
        max_history_bytes: int = 16 * 2**20,
        is_shared: bool = False,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._max_history_bytes = max_history_bytes
        self._now = now
        self._thread = ThreadPoolExecutor(1, "response-store")
        try:
            self._database = sqlite3.connect(
                path,
                timeout=_LOCK_TIMEOUT_S if is_shared else 0.0,
                isolation_level=None,
                check_same_thread=False,
            )
            self._open(is_shared=is_shared)
        except sqlite3.Error as error:
            raise SettingsError((f"--response-store {path}: {error}",)) from error

    def close(self) -> None:
        """Closes the database, after all writes that have begun."""
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queues work for the database thread. It runs even if nobody awaits the result."""
        return asyncio.wrap_future(self._thread.submit(self._guarded, work))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            with self._database:
                # Takes the write lock now: no other worker writes between our reads and writes.
                self._database.execute("BEGIN IMMEDIATE")
                return work()
        except sqlite3.Error as error:
            message = f"the response store failed: {error}"
            raise Unavailable(message, reason="RESPONSE_STORE_FAILED", retry_after_s=1.0) from error

    @_on_thread
    def put(self, owner: str, stored: StoredResponse) -> None:
        """Stores a response; replaces an earlier state of it."""
        items = [(item, False) for item in stored.input]
        items += [(item, True) for item in stored.body["output"]]
        events = None if stored.events is None else b"".join(stored.events)
        head = {**stored.body, "output": []}
        self._put(owner, head, stored.body.get("previous_response_id"), items, events)

    @_on_thread
    def response(self, owner: str, response_id: str) -> StoredResponse:
        """Returns a response."""
        body, events = self._row(owner, response_id, RESPONSE)
        return StoredResponse(
            {**body, "output": self._items(response_id, owner, is_output=True)},
            self._items(response_id, owner, is_output=False),
            None if events is None else [event + b"\n\n" for event in events.split(b"\n\n")[:-1]],
        )

    @_on_thread
    def turns(self, owner: str, response_id: str) -> list[Item]:
        """Returns the input and output items of a response and, before them, those of all earlier
        responses in its chain of `previous_response_id`.

        Raises:
            InvalidArgument: one has not ended, or they exceed `max_history_bytes` together.
        """
        self._row(owner, response_id, RESPONSE)
        items: list[Item] = []
        size = 0
        for entry_id, entry_size, status in self._database.execute(
            _CHAIN, (response_id, owner, owner)
        ).fetchall():
            if entry_size is None:
                raise _missing(entry_id)
            if status in _RUNNING:
                message = f"response {entry_id} is {status}; it must have ended"
                raise InvalidArgument.of("RESPONSE_RUNNING", "previous_response_id", message)
            size += entry_size
            self._check_history("previous_response_id", size)
            items += self._items(entry_id, owner)
        return items

    @_on_thread
    def item(self, owner: str, item_id: str) -> Item:
        """Returns an item of any entry."""
        row = self._database.execute(
            "SELECT items.body FROM items JOIN entries ON entries.id = items.entry "
            "WHERE items.id = ? AND owner = ? ORDER BY changed DESC LIMIT 1",
            (item_id, owner),
        ).fetchone()
        if row is None:
            raise _missing(item_id)
        item: Item = orjson.loads(row[0])
        return item

    @_on_thread
    def delete(self, owner: str, entry_id: str, kind: str) -> None:
        """Deletes an entry."""
        self._row(owner, entry_id, kind)
        self._delete_where("id = ?", entry_id)

    @_on_thread
    def put_entry(self, owner: str, body: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Stores a new conversation or chat."""
        self._put(owner, body, None, [(item, False) for item in items], None)

    @_on_thread
    def set_metadata(
        self, owner: str, entry_id: str, kind: str, metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """Replaces the metadata of a conversation or chat and returns its new body."""
        body = self._row(owner, entry_id, kind)[0]
        changed = {**body, "metadata": metadata}
        old, new = orjson.dumps(body), orjson.dumps(changed)
        self._database.execute("UPDATE entries SET body = ? WHERE id = ?", (new.decode(), entry_id))
        self._grow(owner, entry_id, len(new) - len(old))
        return changed

    @_on_thread
    def append(self, owner: str, conversation_id: str, items: Sequence[Item]) -> None:
        """Adds items at the end of a conversation."""
        self._row(owner, conversation_id, CONVERSATION)
        (count,) = self._database.execute(
            "SELECT coalesce(max(position) + 1, 0) FROM items WHERE entry = ?", (conversation_id,)
        ).fetchone()
        size = self._add_items(conversation_id, [(item, False) for item in items], count)
        self._grow(owner, conversation_id, size)

    @_on_thread
    def entry(self, owner: str, entry_id: str, kind: str) -> dict[str, Any]:
        """Returns the body of an entry."""
        return self._row(owner, entry_id, kind)[0]

    @_on_thread
    def entry_items(self, owner: str, entry_id: str, kind: str) -> list[Item]:
        """Returns all items of an entry, oldest first.

        Raises:
            InvalidArgument: the entry is larger than `max_history_bytes`.
        """
        self._row(owner, entry_id, kind)
        (size,) = self._database.execute(
            "SELECT size FROM entries WHERE id = ?", (entry_id,)
        ).fetchone()
        self._check_history("conversation", size)
        return self._items(entry_id, owner)

    @_on_thread
    def chats(
        self,
        owner: str,
        after: str | None,
        limit: int,
        order: Order,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> list[Item]:
        """Returns chats, at most one more than `limit`.

        Args:
            after: only the chats after the one with this id; None starts at the first.
            order: `asc`, oldest first, or `desc`.
            model: only chats with this model; None lists all.
            metadata: only chats with all of these pairs.
        """
        is_ascending = order == "asc"
        conditions = "owner = ? AND id GLOB ? AND changed >= ?"
        values: list[Any] = [owner, f"{CHAT}*", self._now() - self._max_age_s]
        if after is not None:
            self._row(owner, after, CHAT)
            conditions += f" AND rowid {'>' if is_ascending else '<'} "
            conditions += "(SELECT rowid FROM entries WHERE id = ?)"
            values.append(after)
        if model is not None:
            conditions += " AND json_extract(body, '$.model') = ?"
            values.append(model)
        for pair in metadata.items():
            conditions += " AND EXISTS (SELECT 1 FROM json_each(body, '$.metadata') AS pair"
            conditions += " WHERE pair.key = ? AND pair.value = ?)"
            values += pair
        direction = "ASC" if is_ascending else "DESC"
        rows = self._database.execute(
            f"SELECT body FROM entries WHERE {conditions} ORDER BY rowid {direction} LIMIT ?",
            (*values, limit + 1),
        )
        return [orjson.loads(body) for (body,) in rows]

    @_on_thread
    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> None:
        """Deletes an item of a conversation."""
        body = self._row(owner, conversation_id, CONVERSATION)[0]
        items = self._items(conversation_id, owner)
        remaining = [(item, False) for item in items if item["id"] != item_id]
        if len(remaining) == len(items):
            raise _missing(item_id)
        self._put(owner, body, None, remaining, None)

    @_on_thread
    def num_bytes(self) -> int:
        """Returns the size of all stored entries."""
        return sum(self._sizes().values())

    def _sizes(self) -> dict[str, int]:
        """Returns the bytes that each owner stores."""
        return dict(
            self._database.execute("SELECT owner, sum(size) FROM entries GROUP BY owner").fetchall()
        )

    def _open(self, *, is_shared: bool) -> None:
        database = self._database
        if not is_shared:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        database.executescript(_TABLES)
        if not is_shared:
            database.execute(
                "UPDATE entries SET body = "
                "json_set(body, '$.status', 'failed', '$.error', json(?)) "
                "WHERE json_extract(body, '$.status') IN (?, ?)",
                (_STOPPED, *_RUNNING),
            )

    def _grow(self, owner: str, entry_id: str, num_bytes: int) -> None:
        self._database.execute(
            "UPDATE entries SET size = size + ?, changed = ? WHERE id = ?",
            (num_bytes, self._now(), entry_id),
        )
        self._delete_surplus()

    def _add_items(
        self, entry_id: str, items: Sequence[tuple[Item, bool]], first_position: int = 0
    ) -> int:
        """Adds pairs of item and `is_output` to an entry; returns their size in bytes."""
        num_bytes = 0
        for position, (item, is_output) in enumerate(items, first_position):
            body = orjson.dumps(item)
            num_bytes += len(body)
            row = (entry_id, position, item["id"], is_output, body.decode())
            self._database.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?)", row)
        return num_bytes

    def _put(
        self,
        owner: str,
        body: Mapping[str, Any],
        previous: str | None,
        items: Sequence[tuple[Item, bool]],
        events: bytes | None,
    ) -> None:
        entry_id = str(body["id"])
        self._database.execute("DELETE FROM entries WHERE id = ? AND owner = ?", (entry_id, owner))
        head = orjson.dumps(body)
        size = len(head) + len(events or b"")
        self._database.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
            (entry_id, owner, self._now(), size, previous, head.decode(), events),
        )
        self._grow(owner, entry_id, self._add_items(entry_id, items))

    def _delete_surplus(self) -> None:
        """Deletes entries that are too old, then the oldest of the largest owner until all fit."""
        self._delete_where("changed < ?", self._now() - self._max_age_s)
        while sum((sizes := self._sizes()).values()) > self.max_bytes:
            largest = max(sizes, key=sizes.__getitem__)
            oldest = "SELECT id FROM entries WHERE owner = ? ORDER BY changed LIMIT 1"
            self._delete_where(f"id = ({oldest})", largest)

    def _delete_where(self, condition: str, value: str | float) -> None:
        self._database.execute(f"DELETE FROM entries WHERE {condition}", (value,))

    def _check_history(self, field: str, size: int) -> None:
        limit = self._max_history_bytes
        if size > limit:
            message = f"{field} stands for {size:,} bytes or more; at most {limit:,} are read"
            raise InvalidArgument.of("HISTORY_TOO_LARGE", field, message)

    def _row(self, owner: str, entry_id: str, kind: str) -> tuple[dict[str, Any], bytes | None]:
        """Returns the body and the stream's events of an entry that is not too old."""
        if not entry_id.startswith(kind):
            raise _missing(entry_id)
        row = self._database.execute(
            "SELECT body, events FROM entries WHERE id = ? AND owner = ? AND changed >= ?",
            (entry_id, owner, self._now() - self._max_age_s),
        ).fetchone()
        if row is None:
            raise _missing(entry_id)
        return orjson.loads(row[0]), row[1]

    def _items(self, entry_id: str, owner: str, *, is_output: bool | None = None) -> list[Item]:
        rows = self._database.execute(
            "SELECT items.body FROM items JOIN entries ON entries.id = items.entry "
            "WHERE entry = ? AND owner = ? AND (? IS NULL OR is_output = ?) ORDER BY position",
            (entry_id, owner, is_output, is_output),
        )
        return [orjson.loads(body) for (body,) in rows]


_KINDS = {"chatcmpl": "Completion", "conv": "Conversation", "resp": "Response"}


def _missing(entry_id: str) -> NotFound:
    kind = _KINDS.get(entry_id.partition("_")[0].partition("-")[0], "Item")
    message = (
        f"{kind} with id {entry_id[:128]!r} not found. "
        "It may have been deleted, or dropped to free space."
    )
    return NotFound(message, reason="RESPONSE_NOT_STORED")


def stored_items(items: Sequence[InputItem] | None) -> list[Item]:
    """Returns input items as they are stored: complete, each with an id."""
    return [_stored(item) for item in items or ()]


def _stored(item: InputItem) -> Item:
    stored: dict[str, Any] = {"type": item.type, **item.model_dump(exclude_none=True)}
    stored.setdefault("id", f"{_PREFIXES.get(item.type, 'item')}_{uuid.uuid4().hex}")
    if item.type in ("message", "function_call", "function_call_output", "reasoning"):
        stored.setdefault("status", "completed")
    if item.type == "message":
        stored["content"] = _parts(item)
    if item.type == "reasoning":
        stored.setdefault("summary", [])
    return stored


def _parts(item: InputItem) -> list[dict[str, Any]]:
    is_output = item.role == "assistant"
    kind = "output_text" if is_output else "input_text"
    if isinstance(item.content, list):
        parts = [part.model_dump(exclude_none=True) for part in item.content]
    else:
        parts = [{"type": kind, "text": item.content or ""}]
    if not is_output:
        return parts
    return [{"annotations": [], "logprobs": [], **part} for part in parts]


def item_list(items: Sequence[Item], after: str | None, limit: int, order: Order) -> dict[str, Any]:
    """Returns one page of a list of items.

    Args:
        items: all items, oldest first.

    Raises:
        InvalidArgument: no item has the id `after`.
    """
    ordered = list(items if order == "asc" else reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            message = f"after is {after[:128]!r}; no item has that id"
            raise InvalidArgument.of("FIELD_INVALID", "after", message)
        start = ids.index(after) + 1
    return list_page(ordered[start:], limit)


def list_page(items: Sequence[Item], limit: int) -> dict[str, Any]:
    """Returns the first `limit` items as OpenAI's list object."""
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
