"""The tools of one request, the same for all interfaces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_TOOLS = 256


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    Attributes:
        schema: JSON schema of the arguments, an object.
        is_strict: arguments must match the schema even when the model is free not to call.
    """

    name: str
    description: str | None
    schema: Mapping[str, Any]
    is_strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.schema)}}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        must_call: the answer must be a call; else the model may call.
        forced_name: the one tool that must be called; None leaves the choice to the model.
        is_parallel: whether an answer may hold several calls.
    """

    tools: tuple[Tool, ...]
    must_call: bool = False
    forced_name: str | None = None
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.forced_name is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.forced_name)

    def check(self) -> None:
        """Raises:
        InvalidArgument: there are too many tools, a name is malformed or comes twice, or the forced
            tool is unknown.
        """
        if len(self.tools) > _MAX_TOOLS:
            message = f"tools has {len(self.tools)} tools; at most {_MAX_TOOLS} are taken"
            raise InvalidArgument.of("TOOLS_OUT_OF_RANGE", "tools", message)
        for tool in self.tools:
            if not _NAME.fullmatch(tool.name):
                message = f"a tool is named {tool.name[:80]!r}; it must match {_NAME.pattern}"
                raise InvalidArgument.of("TOOL_NAME_INVALID", "tools", message)
        names = {tool.name for tool in self.tools}
        if len(names) != len(self.tools):
            message = "tools names a tool twice"
            raise InvalidArgument.of("TOOL_NAME_INVALID", "tools", message)
        if self.forced_name is not None and self.forced_name not in names:
            message = f"tool_choice names {self.forced_name[:80]!r}, which is none of the tools"
            raise InvalidArgument.of("TOOL_UNKNOWN", "tool_choice", message)


def schema_of(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a tool's arguments; without parameters it takes an empty object."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return dict(parameters)


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Returns a system message that describes tools, for a template that does not render them."""
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one in a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with a JSON object of its name and arguments between tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>'
    )
