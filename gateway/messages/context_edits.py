"""`context_management`: edits of the turns before the model reads them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.messages.schema import ContextEdit, ContextManagement, Message
from gateway.notices import give_notice
from gateway.refusals import unimplemented
from shared.errors import InvalidArgument

_CLEAR_THINKING = "clear_thinking_20251015"
# Both begin only when the prompt has so many tokens. Here it is never shortened.
_NEVER_APPLIED = ("clear_tool_uses_", "compact_")
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})


def edited(turns: Sequence[Message], management: ContextManagement | None) -> Sequence[Message]:
    """Returns the turns after the edits.

    Raises:
        InvalidArgument: an edit is of a kind nobody knows here.
    """
    for index, edit in enumerate(() if management is None else management.edits or ()):
        field = f"context_management.edits[{index}]"
        if edit.type.startswith(_NEVER_APPLIED):
            give_notice(f"{field} is never applied: prompts are not shortened here")
            continue
        if edit.type != _CLEAR_THINKING:
            raise unimplemented(f"{field}.type", f"{field}.type {edit.type[:64]!r}")
        turns = _without_thoughts(turns, _num_kept(edit, field))
    return turns


def _num_kept(edit: ContextEdit, field: str) -> int | None:
    """Returns the turns of the assistant that keep their thoughts; None for all."""
    keep = edit.keep
    if keep is None:
        return 1
    if keep == "all" or keep == {"type": "all"}:
        return None
    value = keep.get("value") if isinstance(keep, dict) else None
    if type(value) is not int or value < 1:
        message = f"{field}.keep must be all, or thinking_turns with a value of at least 1"
        raise InvalidArgument.of("FIELD_INVALID", f"{field}.keep", message)
    return value


def _without_thoughts(turns: Sequence[Message], num_kept: int | None) -> Sequence[Message]:
    thinking = [index for index, turn in enumerate(turns) if _thinks(turn)]
    cleared = set() if num_kept is None else set(thinking[:-num_kept])
    return [_cleared(turn) if n in cleared else turn for n, turn in enumerate(turns)]


def _thinks(turn: Message) -> bool:
    return turn.role == "assistant" and not isinstance(turn.content, str) and any(
        block.type in _THOUGHTS for block in turn.content
    )  # fmt: skip


def _cleared(turn: Message) -> Message:
    assert not isinstance(turn.content, str)
    blocks = [block for block in turn.content if block.type not in _THOUGHTS]
    return turn.model_copy(update={"content": blocks})
