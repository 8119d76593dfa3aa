"""`make demo`: three questions, each answered with and without speculation, side by side in time.

Talks to a running gateway as any OpenAI client would. Both answers have the same seed, so they must
be the same token by token: speculation changes when tokens come, never which.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types.chat import ChatCompletionChunk

QUESTIONS = (
    "What is the capital of France?",
    "How do I list the files in a folder?",
    "Tell me something about the moon.",
)
_SEED = 7


@dataclass(slots=True)
class Run:
    """One answer as it was streamed.

    Attributes:
        first_token_s: from the request to the first text, in seconds.
        duration_s: from the request to the end.
        speculation: `metrics.speculative_decoding`; None when no draft token was verified.
    """

    token_ids: list[int]
    first_token_s: float
    duration_s: float
    speculation: dict[str, Any] | None

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.duration_s

    def summary(self) -> str:
        """Returns one line of figures."""
        line = f"{len(self.token_ids):4d} tokens  {self.tokens_per_s:7.1f} tokens/s"
        line += f"  first text after {1000 * self.first_token_s:.0f} ms"
        if self.speculation is None:
            return f"{line}  no draft tokens"
        length = self.speculation["mean_acceptance_length"]
        rounds = self.speculation["num_spec_steps"]
        return f"{line}  {length:.2f} tokens a round (bonus included)  {rounds} rounds"


def ask(
    client: OpenAI,
    model: str,
    question: str,
    *,
    with_speculation: bool,
    max_tokens: int,
    temperature: float,
    out: TextIO,
) -> Run:
    """Streams one answer to `out` and returns its figures."""
    begin_s = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=max_tokens,
        temperature=temperature,
        seed=_SEED,
        extra_body={"return_token_ids": True, "speculation": {"disable": not with_speculation}},
    )
    run = Run([], 0.0, 0.0, None)
    for chunk in stream:
        if _take(run, chunk, out) and not run.first_token_s:
            run.first_token_s = time.perf_counter() - begin_s
    run.duration_s = time.perf_counter() - begin_s
    return run


def _take(run: Run, chunk: ChatCompletionChunk, out: TextIO) -> bool:
    """Adds a chunk to the run; returns whether it had text."""
    if not chunk.choices:
        metrics = (chunk.model_extra or {}).get("metrics") or {}
        run.speculation = metrics.get("speculative_decoding")
        return False
    choice = chunk.choices[0]
    run.token_ids += (choice.model_extra or {}).get("token_ids", ())
    if choice.delta.content:
        out.write(choice.delta.content)
        out.flush()
    return bool(choice.delta.content)


def compare(client: OpenAI, question: str, arguments: argparse.Namespace, out: TextIO) -> bool:
    """Asks once with and once without speculation; returns whether the tokens are the same."""
    model = client.models.list().data[0].id
    runs: list[Run] = []
    out.write(f"\n> {question}\n")
    for with_speculation in (True, False):
        out.write(f"\n  speculation {'on ' if with_speculation else 'off'}  ")
        run = ask(
            client,
            model,
            question,
            with_speculation=with_speculation,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            out=out,
        )
        out.write(f"\n  [{run.summary()}]\n")
        runs.append(run)
    same = runs[0].token_ids == runs[1].token_ids
    speedup = runs[1].duration_s / runs[0].duration_s
    verdict = "identical token by token" if same else "DIFFERENT"
    out.write(f"  both answers are {verdict}; with speculation {speedup:.2f} times as fast\n")
    return same


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Returns 0 when every pair of answers is the same, else 1."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    arguments = parser.parse_args(argv)
    try:
        with OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
            same = [compare(client, each, arguments, out) for each in arguments.questions]
    except APIConnectionError:
        out.write(f"nothing answers at {arguments.base_url}; run `make serve` first\n")
        return 1
    except APIStatusError as error:
        out.write(f"\nthe gateway answers {error.status_code}: {error.message}\n")
        return 1
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
