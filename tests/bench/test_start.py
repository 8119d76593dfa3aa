"""The parts of a start: what the target says of itself, and what is seen from outside."""

from __future__ import annotations

import json
from pathlib import Path

from services.target.settings import DEMO_MODEL
from tests.bench.figure import read_figures
from tests.bench.start import parse, run, target_arguments
from tests.bench.start_parts import FIRST_TOKEN, Part, first_token_figure, report, told
from tests.helpers.checkpoints import TinyShape, write_checkpoint


def _line(phase: str, seconds: float, **facts: object) -> str:
    record = {"message": "start-up", "service": "target", "phase": phase, "seconds": seconds}
    return json.dumps(record | facts)


def test_parts_of_parts_are_not_counted_twice() -> None:
    log = "\n".join(
        (
            _line("imports", 1.0),
            "not of the target's logs",
            _line("weights", 2.0, service="target-1"),
            _line("draft/weights", 0.25, size_bytes=10**9),
            _line("draft", 0.5),
            _line("serving", 2.0),
        )
    )
    assert told(log) == {
        "imports": Part(1.0),
        "draft/weights": Part(0.25, 10**9),
        "draft": Part(0.5),
        "between them": Part(0.5),
        "serving": Part(2.0),
    }


def test_the_first_start_stands_beside_the_median_of_the_others() -> None:
    starts = [{"weights": Part(seconds, 4 * 10**9)} for seconds in (4.0, 1.0, 2.0, 9.0)]
    assert report(starts).splitlines()[1].split() == [
        *("weights", "4.000", "2.000", "1.000", "to", "9.000", "4.00", "2.0")
    ]


def test_a_head_goes_into_the_target() -> None:
    arguments = target_arguments(
        parse(["--algorithm", "EAGLE3", "--target-flags", "--page-size 8"])
    )
    assert arguments[2:6] == ("--draft", "embedded", "--speculative-algorithm", "EAGLE3")
    assert arguments[-2:] == ("--page-size", "8")


async def test_a_start_is_measured_to_its_first_token(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", TinyShape(vocab_size=32), seed=3)
    flags = f"--device cpu --max-total-tokens 512 --tokenizer-path {DEMO_MODEL}"
    file = tmp_path / "figures"
    told = ["--figures", str(file), "--target-flags", flags]
    starts = await run(parse(["--model", str(tmp_path), "--repeats", "0", *told]))
    assert len(starts) == 1
    parts = starts[0].keys()
    assert {"imports", "weights", "warm-up", "serving", FIRST_TOKEN} <= parts
    found = first_token_figure(starts)
    assert found.measured == starts[0][FIRST_TOKEN].seconds > 0.0
    assert read_figures(file) == [found]
