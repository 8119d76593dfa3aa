"""`make serve` for real: three processes, one request, an orderly end."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from pathlib import Path

from tests.helpers.checkpoints import write_byte_tokenizer
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.readme import run_requests
from tests.helpers.serving import serving


def _completion(base_url: str) -> dict[str, object]:
    body = {
        "model": json.load(urllib.request.urlopen(f"{base_url}/v1/models"))["data"][0]["id"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, object] = json.load(response)
    return answer


HOSTED = (
    *("--placement", "embedded", "--algorithm", "EAGLE3", "--dtype", "fp32"),
    *("--max-running-requests", "8"),
)


def test_the_stack_answers_and_ends_in_order(tmp_path: Path) -> None:
    """With a draft process: `test_an_installed_package_serves`; over TLS: a line of SGLang's."""
    with serving(tmp_path, *HOSTED) as (process, ready_line, base_url):
        assert ready_line.startswith(f"ready: {base_url}/v1"), process.communicate()[1]
        answer = _completion(base_url)
        by_curl, by_openai = run_requests(base_url, sys.executable)
        assert by_curl.rstrip().endswith("data: [DONE]")
        assert "Paris" in by_openai
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert answer["choices"]
    assert process.returncode == 0
    [line] = [line for line in errors.splitlines() if "waiting for" not in line]
    assert line.startswith("serve: stopping; at most 30 s for requests to finish")


def test_a_draft_that_the_target_refuses_ends_the_start_with_both_folders(tmp_path: Path) -> None:
    tokenizer = tmp_path / "other"
    tokenizer.mkdir()
    write_byte_tokenizer(tokenizer)
    flags = ("--algorithm", "NGRAM", "--placement", "remote", "--draft-tokenizer", str(tokenizer))
    with serving(tmp_path / "logs", *flags) as (process, ready_line, _):
        _, errors = process.communicate(timeout=100)
    assert (ready_line, process.returncode) == ("", 1)
    assert "tokenizer" in errors
    assert "the draft is NGRAM, no model; the target is" in errors
    assert "demo/target" in errors
    assert "--speculative-draft-model-path" in errors
    assert "Event loop is closed" not in errors


def test_a_head_of_another_model_ends_the_start_with_both_folders(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", TinyHead(kind="EAGLE3", draft_vocab_size=20))
    flags = ("--algorithm", "EAGLE3", "--placement", "embedded", "--draft-model", str(head))
    with serving(tmp_path / "logs", *flags) as (process, ready_line, _):
        _, errors = process.communicate(timeout=100)
    assert (ready_line, process.returncode) == ("", 1)
    assert "32; the target's hidden_size is" in errors
    assert f"the draft is EAGLE3, {head}; the target is" in errors
    assert "demo/target" in errors
    assert "name another --speculative-draft-model-path" in errors
    assert "Traceback" not in errors
