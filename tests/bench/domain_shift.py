"""A head meets another domain: what a learner makes of it while it serves, beside a head that was
trained offline on the same domain.

``python -m tests.bench.domain_shift --out DIR`` asks the demo target about countries, sums and the
like, which its heads have nearly forgotten: their last training had none of it. The learner hears
of each answer when it ends; the next questions wait for its lesson, so that what counts is how many
requests it takes, not how fast the machine trains. Then the trainer begins with the same head and
goes over the same answers, and all three heads are measured on questions that none has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from services.draft.settings_problems import DEMO_HEADS, DEMO_TARGET
from services.draft.training.documents import Documents
from tests.bench.stack import running_stack

HELD_OUT = 160
MAX_NEW_TOKENS = 48
LESSON_REQUESTS = 100
_CONCURRENCY = 4
_STEPS = 5
_POLL_S = 1.0
_OF_COUNTRIES = (
    *("What is the capital of {country}?", "Which city is the capital of {country}?"),
    *("Name the capital of {country}.", "What's the capital of {country}?"),
    *("Which continent is {country} in?", "On which continent is {country}?"),
    *("What language is spoken in {country}?", "Which language do people speak in {country}?"),
    *("What is the currency of {country}?", "What money do they use in {country}?"),
    *("Tell me about {country}.", "What do you know about {country}?"),
)
_SUMS = ("What is {a} plus {b}?", "How much is {a} plus {b}?", "Calculate {a} + {b}.")


@dataclass(frozen=True, slots=True)
class Window:
    """What the stack did with some requests.

    Attributes:
        version: of the head, at the end.
        tokens_a_round: the bonus included.
    """

    num_requests: int
    version: int
    tokens_a_round: float


def questions(count: int, seed: int) -> list[list[int]]:
    """Returns different prompts of the domain, as token ids."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    draw, found = random.Random(seed), dict[str, None]()
    lines = Path(__file__).with_name("countries.txt").read_text(encoding="utf-8").splitlines()
    countries = [line.split("|")[0].strip() for line in lines if not line.startswith("# ")]
    while len(found) < count:
        numbers = {"a": draw.randint(0, 100), "b": draw.randint(0, 100)}
        form = draw.choice((*_OF_COUNTRIES, *_SUMS))
        found[form.format(country=draw.choice(countries), **numbers)] = None
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(form.format(each)).ids for each in found]


async def _served(arguments: argparse.Namespace, prompts: Sequence[list[int]]) -> list[Window]:
    """Asks a stack with a learner; writes the texts, and returns what each window brought."""
    logs = arguments.out / "logs"
    windows, texts = list[Window](), list[list[int]]()
    url = f"http://127.0.0.1:{arguments.port}"
    async with (
        running_stack(_flags(arguments, logs)),
        httpx.AsyncClient(base_url=url, timeout=300.0) as client,
    ):
        for begin in range(0, len(prompts), LESSON_REQUESTS):
            part = prompts[begin : begin + LESSON_REQUESTS]
            answers = await _answers(client, part)
            texts += [[*prompt, *a["output_ids"]] for prompt, a in zip(part, answers, strict=True)]
            infos = [answer["meta_info"] for answer in answers]
            # The first token of an answer comes out of its prompt.
            num_tokens = sum(info["completion_tokens"] - 1 for info in infos)
            num_rounds = num_tokens - sum(info.get("spec_accept_token_num", 0) for info in infos)
            lesson = await _lesson(logs / "learner", len(windows) + 1)
            windows.append(
                Window(begin + len(part), lesson["version"], num_tokens / max(num_rounds, 1))
            )
            print(
                f"{windows[-1].num_requests:5d} requests: {windows[-1].tokens_a_round:.3f} tokens "
                f"a round served; {lesson['event']}, version {lesson['version']}, held out "
                f"{lesson['before']} to {lesson['after']}",
                flush=True,
            )
    Documents.of(texts).save(arguments.out / "answers.npz")
    return windows


def _flags(arguments: argparse.Namespace, logs: Path) -> list[str]:
    # A lesson for each window: half of its tokens start one.
    os.environ["OUTRIDER_LEARNER_LESSON_TOKENS"] = str(LESSON_REQUESTS * 12)
    os.environ["OUTRIDER_LEARNER_LESSON_UPDATES"] = str(arguments.updates)
    return [
        *("--port", str(arguments.port), "--log-dir", str(logs), "--speculative-online-training"),
        *("--speculative-algorithm", arguments.algorithm, "--context-length", "512"),
        *("--speculative-num-steps", str(_STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(_STEPS + 1)),
    ]


async def _answers(client: httpx.AsyncClient, prompts: Sequence[list[int]]) -> list[Any]:
    free = asyncio.Semaphore(_CONCURRENCY)
    sampling = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}

    async def one(prompt: list[int]) -> Any:
        async with free:
            body = {"input_ids": prompt, "sampling_params": sampling}
            return (await client.post("/generate", json=body)).raise_for_status().json()

    return await asyncio.gather(*map(one, prompts))


async def _lesson(folder: Path, number: int) -> dict[str, Any]:
    """Waits for a lesson and for whether it stays."""
    log = folder / "lessons.jsonl"
    while True:
        lines = log.read_text().splitlines() if log.is_file() else []
        lessons = [json.loads(line) for line in lines]
        if lessons and lessons[-1]["num_lessons"] >= number:
            found: dict[str, Any] = lessons[-1]
            return found
        await asyncio.sleep(_POLL_S)


def train(algorithm: str, num_steps: int, start: Path, texts: Path, out: Path) -> None:
    """Trains a head offline on texts."""
    command = [sys.executable, "-m", "services.draft.training"]
    subprocess.run(
        [
            *(*command, "train", "--target", str(DEMO_TARGET), "--init", str(start)),
            *("--algorithm", algorithm, "--data", str(texts)),
            *("--out", str(out), "--window", "256", "--unroll", "4", "--batch-size", "3"),
            *("--steps", str(num_steps)),
        ],
        check=True,
    )


def _measured(out: Path, heads: dict[str, Path], prompts: Sequence[list[int]]) -> dict[str, float]:
    """Returns tokens a round of chains of five on the target's greedy answers."""
    held_out = out / "held-out.npz"
    Documents.of(prompts).save(held_out)
    report = out / "heads.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "services.draft.training", "evaluate"),
            *("--target", str(DEMO_TARGET), "--prompts", str(held_out), "--out", str(report)),
            *("--max-new-tokens", str(MAX_NEW_TOKENS), "--steps", str(_STEPS)),
            *("--head", *map(str, heads.values())),
        ],
        check=True,
    )
    found = json.loads(report.read_text())
    lengths = {name: found[str(path)]["accepted_length_with_bonus"] for name, path in heads.items()}
    assert all(np.isfinite(each) for each in lengths.values())
    return lengths


def main() -> None:
    """Prints the way there and, at the end, the learnt head beside the trained one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for heads, texts and logs")
    parser.add_argument("--algorithm", default="EAGLE3", choices=("EAGLE", "EAGLE3", "MTP"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--updates", type=int, default=100, help="of a lesson")
    parser.add_argument("--offline-steps", type=int, default=600)
    parser.add_argument("--offline", type=Path, help="a head that was trained so, to compare with")
    parser.add_argument("--port", type=int, default=8931)
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    prompts = questions(arguments.requests + HELD_OUT, seed=7)
    start = DEMO_HEADS / arguments.algorithm.lower()
    windows = asyncio.run(_served(arguments, prompts[: arguments.requests]))
    version = windows[-1].version
    offline = arguments.offline or arguments.out / "offline"
    if arguments.offline is None:
        texts = arguments.out / "answers.npz"
        train(arguments.algorithm, arguments.offline_steps, start, texts, offline)
    learnt = arguments.out / "logs" / "learner" / f"version-{version}" if version else start
    heads = {"start": start, "learnt": learnt, "offline": offline}
    lengths = _measured(arguments.out, heads, prompts[arguments.requests :])
    share = lengths["learnt"] / lengths["offline"]
    print(
        f"{arguments.algorithm}, tokens a round on {HELD_OUT} questions held out: "
        f"{lengths['start']:.3f} at the start, {lengths['learnt']:.3f} after "
        f"{arguments.requests} requests, {lengths['offline']:.3f} trained offline: {share:.1%}"
    )


if __name__ == "__main__":
    main()
