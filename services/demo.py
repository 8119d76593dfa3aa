"""`make demo`: longer answers, each with and without speculation, and what the figures mean.

Talks to a running gateway as any OpenAI client would. Both answers have the same seed, so they must
be the same token by token: speculation changes when tokens come, never which. One answer each way
comes first and is not counted: it warms the server up.
"""

from __future__ import annotations

import argparse
import io
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from openai import APIConnectionError, APIStatusError, DefaultHttpxClient, OpenAI

from shared.tls import CertFolder

QUESTIONS = (
    "Write a travel guide for Paris.",
    "Tell me a story about a fox in a forest.",
    "Write a blog post about a trip to Rome.",
)
_SEED = 7
_WARM_UP_TOKENS = 24


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
    def rounds(self) -> int:
        """Number of rounds in which the target verified draft tokens."""
        return 0 if self.speculation is None else int(self.speculation["num_spec_steps"])

    @property
    def length(self) -> float:
        """Mean acceptance length of those rounds, bonus token included."""
        return (
            0.0 if self.speculation is None else float(self.speculation["mean_acceptance_length"])
        )

    def summary(self) -> str:
        """Returns one line of figures."""
        num_tokens = len(self.token_ids)
        line = f"{num_tokens:4d} tokens  {num_tokens / self.duration_s:7.1f} tokens/s"
        line += f"  first text after {1000 * self.first_token_s:.0f} ms"
        if self.speculation is None:
            return f"{line}  no draft tokens"
        return f"{line}  {self.length:.2f} tokens a round (bonus included)  {self.rounds} rounds"


@dataclass(frozen=True, slots=True)
class Pair:
    """One question answered with and without speculation; `plain` is None without a draft."""

    drafted: Run
    plain: Run | None

    @property
    def is_same(self) -> bool:
        return self.plain is None or self.drafted.token_ids == self.plain.token_ids


@dataclass(frozen=True, slots=True)
class Demo:
    """Asks a running gateway and writes its answers.

    Raises (every method):
        openai.APIConnectionError, openai.APIStatusError: the gateway does not answer, or refuses.
    """

    client: OpenAI
    model: str
    temperature: float
    out: TextIO

    def compare(self, question: str, max_tokens: int) -> Pair:
        """Asks with speculation and, if a draft took part, without."""
        self.out.write(f"\n> {question}\n")
        drafted = self._answer(question, max_tokens, is_drafted=True)
        if drafted.speculation is None:
            return Pair(drafted, None)
        plain = self._answer(question, max_tokens, is_drafted=False)
        pair = Pair(drafted, plain)
        verdict = "identical token by token" if pair.is_same else "DIFFERENT"
        speedup = plain.duration_s / drafted.duration_s
        self.out.write(
            f"  both answers are {verdict}; with speculation {speedup:.2f} times as fast\n"
        )
        return pair

    def speculation_detail(self) -> str:
        """Returns why the first target verifies no trees; empty where it does."""
        url = f"{str(self.client.base_url).removesuffix('v1/')}server_info"
        info = cast(dict[str, Any], self.client.get(url, cast_to=object))
        return str(info["targets"][0].get("speculation_detail") or "")

    def _answer(self, question: str, max_tokens: int, *, is_drafted: bool) -> Run:
        """Streams one answer and returns its figures."""
        out = self.out
        out.write(f"\n  speculation {'on ' if is_drafted else 'off'}  ")
        run, begin_s = Run([], 0.0, 0.0, None), time.perf_counter()
        for chunk in self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=max_tokens,
            temperature=self.temperature,
            seed=_SEED,
            extra_body={"return_token_ids": True, "speculation": {"disable": not is_drafted}},
        ):
            if not chunk.choices:
                metrics = (chunk.model_extra or {}).get("metrics") or {}
                run.speculation = metrics.get("speculative_decoding")
                continue
            choice = chunk.choices[0]
            run.token_ids += (choice.model_extra or {}).get("token_ids", ())
            if choice.delta.content:
                run.first_token_s = run.first_token_s or time.perf_counter() - begin_s
                out.write(choice.delta.content)
                out.flush()
        run.duration_s = time.perf_counter() - begin_s
        out.write(f"\n  [{run.summary()}]\n")
        return run


def conclusion(pairs: Sequence[Pair], detail: str = "") -> str:
    """Returns the result of the comparison in words, also where speculation is slower.

    Args:
        detail: the target's reason for verifying no trees; empty where it does.
    """
    compared = [(pair.drafted, pair.plain) for pair in pairs if pair.plain is not None]
    if not compared:
        reason = detail or "none is attached (`make serve ALGORITHM=STANDALONE` starts one)"
        return f"No draft took part, so there was nothing to compare: {reason}."
    drafted, plain = (sum(run.duration_s for run in runs) for runs in zip(*compared, strict=True))
    num_tokens = sum(len(run.token_ids) for run, _ in compared)
    num_drafted = sum(run.rounds * run.length for run, _ in compared)
    lines = [
        f"Speculation was {plain / drafted:.2f} times as fast over {len(compared)} answers of "
        f"{num_tokens} tokens: {num_tokens / drafted:.0f} instead of {num_tokens / plain:.0f} "
        f"tokens/s, with the same tokens."
    ]
    if num_drafted < num_tokens / 2:
        lines.append(
            f"Only {num_drafted:.0f} of the tokens came from rounds with a draft: "
            f"{detail or 'trees bring too little here'}. "
            "`--candidate-wait-sequences N` insists on trees of up to N requests."
        )
        return "\n".join(lines)
    num_rounds = sum(run.rounds for run, _ in compared)
    step_ms, round_ms = 1000 * plain / num_tokens, 1000 * drafted / num_rounds
    lines.append(
        f"A plain step takes {step_ms:.1f} ms and brings one token. A round takes {round_ms:.1f} "
        f"ms and brings {num_drafted / num_rounds:.2f}: those of the draft's candidates that the "
        f"target would have written itself, and one of its own."
    )
    if plain < drafted:
        lines.append(
            f"That is a loss: a round costs as much as {round_ms / step_ms:.2f} plain steps, more "
            f"than it brings. Target and draft share the cores of this machine, and on a CPU a "
            f"row more is a row's work more; on a GPU a forward over a tree takes little longer "
            f"than over one token. Other loads on this machine count as well."
        )
    return "\n".join(lines)


def _connected(base_url: str, api_key: str, certs: Path) -> tuple[OpenAI, str]:
    """Returns a client of the gateway and the model's name. A gateway that does not answer HTTP is
    asked by HTTPS.

    Args:
        certs: folder whose authority is trusted besides those of this machine, if it is there.
    """
    trusted, own = ssl.create_default_context(), CertFolder(certs)
    if own.ca.is_file():
        trusted.load_verify_locations(own.ca)
    client = OpenAI(
        base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=trusted)
    )
    try:
        return client, client.models.list().data[0].id
    except APIConnectionError:
        client.close()
        if not base_url.startswith("http:"):
            raise
    return _connected(f"https{base_url.removeprefix('http')}", api_key, certs)


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Returns 0 when every pair of answers is the same, else 1."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--certs", type=Path, default=Path(".certs"), help="of `make certs`")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    arguments = parser.parse_args(argv)
    try:
        client, model = _connected(arguments.base_url, arguments.api_key, arguments.certs)
        with client:
            # The answers of the warm-up are not shown.
            warm_up = Demo(client, model, arguments.temperature, io.StringIO())
            warm_up.compare(arguments.questions[0], _WARM_UP_TOKENS)
            demo = Demo(client, model, arguments.temperature, out)
            pairs = [demo.compare(text, arguments.max_tokens) for text in arguments.questions]
            detail = demo.speculation_detail()
    except APIConnectionError:
        out.write(
            f"nothing answers at {arguments.base_url}, with or without the certificates of "
            f"{arguments.certs}; run `make serve` first\n"
        )
        return 1
    except APIStatusError as error:
        out.write(f"\nthe gateway answers {error.status_code}: {error.message}\n")
        return 1
    out.write(f"\n{conclusion(pairs, detail)}\n")
    return 0 if all(pair.is_same for pair in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
