"""Calls whose arguments do not come as one JSON object: tags around each, or Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.output.parser import CallArguments, CallBegun, OutputParser
from gateway.output.tool_formats import FAMILIES
from tests.gateway.output.parsing import (
    JSON,
    Calls,
    check_every_cut,
    cut_anywhere,
    parse,
    whole,
)

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "write": {
        "$defs": {"Line": {"type": "integer"}},
        "properties": {
            "text": {"type": "string"},
            "line": {"$ref": "#/$defs/Line"},
            "flags": {"type": ["boolean", "null"]},
            "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "many": {"type": "array", "items": {}},
        },
    },
    "ping": {},
}
PING = ("ping", "{}")
CODE = 'if a < b:\n\tprint("</p>\\n")\n'
WRITE = ("write", json.dumps({"text": CODE, "line": 3}))
TAGGED = {
    "qwen3-coder": (
        f"<tool_call>\n<function=write>\n<parameter=text>\n{CODE}\n</parameter>\n"
        "<parameter=line>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    ),
    "seed-oss": (
        f"<seed:tool_call>\n<function=write>\n<parameter=text>{CODE}</parameter>\n"
        "<parameter=line>3</parameter>\n</function>\n</seed:tool_call>",
        "<seed:tool_call><function=ping></function></seed:tool_call>",
    ),
    "glm45": (
        f"<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{CODE}</arg_value>\n"
        "<arg_key>line</arg_key><arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>ping</tool_call>",
    ),
    "minimax-m2": (
        f'<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">{CODE}</parameter>\n'
        '<parameter name="line">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call><invoke name="ping"></invoke></minimax:tool_call>',
    ),
    "pythonic": (f"[write(text={CODE!r}, line=3)]", "[ping()]"),
}
CASES: list[tuple[str, str, str, Calls]] = [
    *[(family, f"{both[0]}\n", "", [WRITE]) for family, both in TAGGED.items()],
    *[(family, both[1], "", [PING]) for family, both in TAGGED.items()],
    *[(family, "Plain <tool [text](x).\n", "Plain <tool [text](x).\n", []) for family in TAGGED],
    *[
        (family, f"So: {both[0]}\n{both[1]} Done.", "So: Done.", [WRITE, PING])
        for family, both in TAGGED.items()
        if family != "pythonic"
    ],
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n<invoke name="ping">\n</invoke>\n'
        "</minimax:tool_call>",
        "", [PING, PING],
    ),
    # The first tag forgotten: a tool's name makes up for it, another does not.
    ("qwen3-coder", "<function=ping>\n</function>\n</tool_call>", "", [PING]),
    ("qwen3-coder", "<function=pong>\n</function>", "<function=pong>\n</function>", []),
    ("qwen3-coder", "<tool_call>\nhm</tool_call>", "<tool_call>\nhm</tool_call>", []),
    ("qwen3-coder", "<tool_call>\n<function=ping>\nhm", "<tool_call>\n<function=ping>\nhm", []),
    (
        "qwen3-coder",
        "<tool_call><function=write><parameter=text>a</parameter>hm</function>",
        "hm</function>", [("write", '{"text": "a"')],
    ),
    (
        "qwen3-coder",
        '<tool_call>\n<function=write>\n<parameter=text>\na "quote',
        "", [("write", '{"text": "a \\"quote')],
    ),
    ("qwen3-coder", "<tool_call><function=ping><param", "<tool_call><function=ping><param", []),
    ("glm45", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("glm45", "<tool_call>write\n<arg_key>te", "<tool_call>write\n<arg_key>te", []),
    ("pythonic", '["ping", 1]', '["ping", 1]', []),
    ("pythonic", "[pong(a=1)]", "[pong(a=1)]", []),
    ("pythonic", "[ping(1)]", "[ping(1)]", []),
    ("pythonic", "[ping(a=exit())]", "[ping(a=exit())]", []),
    ("pythonic", "[ping(a=b)]", "[ping(a=b)]", []),
    ("pythonic", "[ping(a=[1, 2)]", "[ping(a=[1, 2)]", []),
    ("pythonic", "[ping(a=1, b=c)]", ", b=c)]", [("ping", '{"a": 1')]),
    ("pythonic", "[ping(), hm", ", hm", [PING]),
    ("pythonic", "[ping(", "[ping(", []),
    ("pythonic", "  [ ping( ) , ping() ] ", "", [PING, PING]),
    (
        "pythonic",
        "<|python_start|>[write(text='a, (\\'b\\'', flags=None, many=[True, {'a': (1, 2)}, null])]"
        "<|python_end|>",
        "",
        [("write", '{"text": "a, (\'b\'", "flags": null, "many": [true, {"a": [1, 2]}, null]}')],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_parts_are_the_same_for_every_cut(
    family: str, text: str, content: str, calls: Calls
) -> None:
    check_every_cut(FAMILIES[family].read(SCHEMAS), text, (content, calls, ""))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", '"12"'),
        ("text", " null ", '" null "'),
        ("line", "12", "12"),
        ("line", " 12\n", "12"),
        ("line", "twelve", '"twelve"'),
        ("line", "1.5", "1.5"),
        ("flags", "True", "true"),
        ("flags", "None", "null"),
        ("who", "null", "null"),
        ("who", "12", '"12"'),
        ("who", '"Ada"', '"\\"Ada\\""'),
        ("many", "[1, {}]", "[1, {}]"),
        ("many", "['a', True]", '["a", true]'),
        ("many", "[NaN]", '"[NaN]"'),
        ("unknown", "12", "12"),
        ("unknown", "True", '"True"'),
        ("unknown", "[1", '"[1"'),
        ("line", "1" * 5000, '"' + "1" * 5000 + '"'),
        ("many", "[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
def test_bare_text_is_of_the_type_that_the_schema_says(key: str, text: str, value: str) -> None:
    output = f"<tool_call>write<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    found = whole(parse(FAMILIES["glm45"].read(SCHEMAS), [output]))
    assert found == ("", [("write", f'{{"{key}": {value}}}')], "")


def _written(family: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call as the family's template writes it."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    if family == "pythonic":
        return "[write(" + ", ".join(f"{k}={v!r}" for k, v in arguments.items()) + ")]"
    if family == "glm45":
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items())
        return f"<tool_call>write\n{''.join(pairs)}</tool_call>"
    if family == "minimax-m2":
        pairs = (f'<parameter name="{k}">{v}</parameter>\n' for k, v in texts.items())
        head, tail = (
            '<minimax:tool_call>\n<invoke name="write">\n',
            "</invoke>\n</minimax:tool_call>",
        )
        return head + "".join(pairs) + tail
    pairs = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function=write>\n{''.join(pairs)}</function>\n</tool_call>"


_TEXT = st.text(max_size=12).filter(lambda text: "</" not in text)


@settings(max_examples=200)
@given(
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "text": _TEXT,
            "line": st.integers(),
            "flags": st.none() | st.booleans(),
            "who": st.none() | _TEXT.filter(lambda text: text.strip() != "null"),
            "many": st.lists(JSON, max_size=3),
        },
    ),
    family=st.sampled_from(["qwen3-coder", "glm45", "minimax-m2", "pythonic"]),
    data=st.data(),
)
def test_any_arguments_arrive(arguments: dict[str, Any], family: str, data: st.DataObject) -> None:
    text = _written(family, arguments)
    content, calls, _ = whole(parse(FAMILIES[family].read(SCHEMAS), cut_anywhere(text, data)))
    assert (content, [name for name, _ in calls]) == ("", ["write"])
    assert json.loads(calls[0][1]) == arguments


_SOUP = {
    family: st.lists(
        st.sampled_from([*"\n x1\"'()[]=,<>/", "ping", "write", "text", "line", *pieces]),
        max_size=16,
    ).map("".join)
    for family, pieces in {
        "hermes": ["<tool_call>", "</tool_call>", '{"name": "ping"', '"arguments": {}', "}"],
        "qwen3-coder": [
            *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter="),
            *("</parameter>", "<function=write>", "<parameter=text>", "<parameter=line>\n"),
        ],
        "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"],
        "minimax-m2": ["<minimax:tool_call>", '<invoke name="', '">', "</invoke>", "<parameter"],
        "kimi-k2": [
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "functions.ping:0"),
            *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "{}"),
        ],
        "pythonic": ["[ping(", "[write(text=", "line=3", "\\", "{", "}", "<|python_start|>"],
    }.items()
}


@settings(max_examples=600)
@given(family=st.sampled_from(sorted(_SOUP)), data=st.data())
def test_garble_is_the_same_for_any_cuts_and_is_text_where_it_is_no_call(
    family: str, data: st.DataObject
) -> None:
    text = data.draw(_SOUP[family])
    expected = whole(parse(FAMILIES[family].read(SCHEMAS), [text]))
    found = whole(parse(FAMILIES[family].read(SCHEMAS), cut_anywhere(text, data)))
    assert found == expected
    if not expected[1]:
        assert _marrow(expected[0]) == _marrow(text)


def _marrow(text: str) -> str:
    """Returns a text without what is not shown even where there is no call: white space at the
    margins, and the special tokens around a section of calls."""
    for mark in ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|python_start|>"):
        text = text.replace(mark, "")
    return "".join(text.split())


def test_strings_stream_before_they_are_whole() -> None:
    parser = OutputParser(FAMILIES["qwen3-coder"].read(SCHEMAS), lambda: "c")
    assert parser.push("<tool_call>\n<function=write>\n") == []
    assert parser.push("<parameter=text>\nlong te") == [
        CallBegun(0, "c", "write"),
        CallArguments(0, '{"text": "long te'),
    ]
    assert parser.push('xt "\n') == [CallArguments(0, 'xt \\"')]
    assert parser.push("more") == [CallArguments(0, "\\nmore")]
