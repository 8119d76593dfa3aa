"""The context of a response: stored responses, a stored conversation, items named by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from gateway.responses.schema import InputItem, ResponsesRequest
from gateway.responses.store import CONVERSATION, Item, ResponseStore
from gateway.responses.stored_items import stored_items
from shared.errors import InvalidArgument

_ITEMS = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class History:
    """The conversation that a response continues.

    Attributes:
        items: all of it in order, each with the field it came in.
        own: the items of the request itself, as they are kept.
        is_kept: whether the response is kept.
    """

    items: Sequence[tuple[str, InputItem]]
    own: Sequence[Item]
    is_kept: bool


async def history_of(body: ResponsesRequest, store: ResponseStore | None, owner: str) -> History:
    """Args:
        store: None where nothing is kept.
        owner: name of the client's key.

    Raises:
        InvalidArgument: something needs a store, or the fields do not go together.
        NotFound: nothing of that name is kept for this client.
    """
    if store is None:
        _refuse_without_store(body)
        return History(_named(body.input), (), False)
    _check(body)
    before = await _before(body, store, owner)
    own = [
        item if not item.is_reference else await _referred(item, f"input[{index}]", store, owner)
        for index, item in enumerate(_listed(body.input))
    ]
    is_kept = body.store is not False
    return History([*before, *_named(own)], stored_items(own), is_kept)


async def _before(
    body: ResponsesRequest, store: ResponseStore, owner: str
) -> list[tuple[str, InputItem]]:
    if body.previous_response_id is not None:
        field, found = "previous_response_id", await store.turns(owner, body.previous_response_id)
    elif body.conversation_id is not None:
        field = "conversation"
        found = await store.entry_items(owner, body.conversation_id, CONVERSATION)
    else:
        return []
    return [(field, item) for item in _ITEMS.validate_python(found)]


async def _referred(item: InputItem, field: str, store: ResponseStore, owner: str) -> InputItem:
    if item.id is None:
        raise InvalidArgument.of("FIELD_INVALID", f"{field}.id", f"{field}.id is missing")
    return InputItem.model_validate(await store.item(owner, item.id))


def _check(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None and body.conversation is not None:
        message = "conversation is set beside previous_response_id; only one may be"
        raise InvalidArgument.of("HISTORY_AMBIGUOUS", "conversation", message)
    if body.background and body.store is False:
        message = "background is true; it needs store to be true"
        raise InvalidArgument.of("STORE_OFF", "background", message)


def _refuse_without_store(body: ResponsesRequest) -> None:
    needs = {
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "background": body.background,
        "store": body.store,
    }
    for index, item in enumerate(_listed(body.input)):
        needs[f"input[{index}]"] = item.is_reference
    for field, given in needs.items():
        if given:
            raise InvalidArgument.of("STORE_OFF", field, f"{field} needs --response-store")


def _listed(given: str | list[InputItem] | None) -> list[InputItem]:
    if isinstance(given, str):
        return [InputItem(type="message", role="user", content=given)]
    return given or []


def _named(given: str | list[InputItem] | None) -> list[tuple[str, InputItem]]:
    return [(f"input[{index}]", item) for index, item in enumerate(_listed(given))]
