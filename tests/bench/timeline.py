"""A picture of a few rounds: target, wire and draft on one axis of time.

    python -m tests.bench.timeline --out rounds.svg
    python -m tests.bench.timeline --logs target.jsonl draft.jsonl --out rounds.svg

Starts a target and a draft with a round log each, answers one prompt and draws the middle of it;
or draws logs that are there (`--round-log` of both services, on one host).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from services.target.settings import DEMO_MODEL
from shared.errors import OutriderError
from tests.bench.chat_prompts import chat_prompts
from tests.bench.pair import PairFailed, PairSettings, running_pair
from tests.bench.recording import record
from tests.bench.round_svg import Rounds, picture, read_rounds
from tests.bench.session import RequestFailed
from tests.load.prompts import PROMPTS


async def _answered(settings: PairSettings, *, num_tokens: int, temperature: float) -> Rounds:
    """Answers a prompt twice: the first time warms everything up."""
    [prompt] = await chat_prompts(settings.model, PROMPTS[2:3])
    async with running_pair(settings) as pair:

        async def answer() -> None:
            await pair.answer(prompt, num_tokens=num_tokens, temperature=temperature, seed=0)

        await answer()
        return await record(pair, settings, answer)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="timeline", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--logs", type=Path, nargs=2, metavar=("TARGET", "DRAFT"))
    parser.add_argument("--num-steps", type=int, default=8, help="steps of the target to show")
    parser.add_argument("--first-step", type=int, help="default: the middle of the log")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--target-device", default="auto")
    parser.add_argument("--draft-device", default="auto")
    parser.add_argument("--outcome-budget", type=int, default=6)
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-flags", nargs=argparse.REMAINDER, default=[])
    return parser.parse_args(arguments)


def _settings(flags: argparse.Namespace, folder: Path) -> PairSettings:
    return PairSettings(
        model=flags.model,
        target_flags=("--device", flags.target_device),
        draft_flags=(
            *("--device", flags.draft_device),
            *("--speculative-outcome-budget", str(flags.outcome_budget)),
            *flags.draft_flags,
        ),
        folder=folder,
        logs_rounds=True,
    )


def _rounds(flags: argparse.Namespace) -> Rounds:
    if flags.logs:
        return read_rounds(*flags.logs)
    with tempfile.TemporaryDirectory(prefix="outrider-timeline-") as name:
        settings = _settings(flags, Path(name))
        try:
            return asyncio.run(
                _answered(settings, num_tokens=flags.num_tokens, temperature=flags.temperature)
            )
        except PairFailed:
            for service in ("target", "draft"):
                print((settings.folder / f"{service}.log").read_text()[-2000:], file=sys.stderr)
            raise


def main() -> int:
    flags = _parse(sys.argv[1:])
    try:
        drawn = picture(_rounds(flags), flags.num_steps, flags.first_step)
    except (OutriderError, PairFailed, RequestFailed, OSError, ValueError) as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 1
    flags.out.write_text(drawn.svg, encoding="utf-8")
    print(f"{flags.out}: {drawn.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
