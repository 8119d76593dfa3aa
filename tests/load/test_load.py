"""`make load`, against a canned gateway."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.load.__main__ import parse, run
from tests.load.prompts import PROMPTS

ANSWER = (
    'data: {"choices": [{"delta": {"content": "Good day"}}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    "data: [DONE]\n\n"
)
RECORDS = (
    {"prompt": "one"},
    {"turns": ["two", "and then"]},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]},
)


async def test_prompts_of_a_file_are_sent_in_turn_with_the_key(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    keys, asked = set(), []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.add(request.headers.get("authorization"))
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        asked.append(json.loads(request.content)["messages"][0]["content"])
        return httpx.Response(200, text=ANSWER)

    flags = ["--prompts", str(file), "--api-key", "secret", "--requests", "4", "--concurrency", "1"]
    report = await run(parse(flags)[0], httpx.MockTransport(answer))
    assert not report.errors
    assert asked == ["one", "two", "three", "one"]
    assert keys == {"Bearer secret"}


def test_without_flags_the_prompts_are_our_own_and_no_key_is_sent() -> None:
    settings, _ = parse([])
    assert (settings.prompts, settings.api_key) == (PROMPTS, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "is empty"), ('{"text": "one"}', "has none of prompt"), ("one", "--prompts: ")],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse(["--prompts", str(file)])
    assert problem in capsys.readouterr().err
