"""Tools of a namespace. Models know plain names, so a tool gets that of its namespace before its
own; clients get both back as they gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.responses.schema import Tool


def flat_name(name: str, namespace: str | None) -> str:
    """Returns what the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def namespaces(tools: Sequence[Tool]) -> Mapping[str, tuple[str, str]]:
    """Returns the namespace and the name of each tool that is in one, by its flat name."""
    return {
        flat_name(inner.name, tool.name): (tool.name, inner.name)
        for tool in tools
        if tool.type == "namespace" and tool.name is not None
        for inner in tool.tools or ()
        if inner.name is not None
    }
