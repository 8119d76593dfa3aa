"""`python -m tests.bench.simulate`: tokens a second of a hardware split, from measured times.

Reads scenarios from a JSON file (by default `scenarios.json` beside this program: the published
figures of one H200, and a 70B on four of them with a draft pool across hosts) and prints what each
would give. `--check` compares with the scenarios' measured speeds and fails beyond `--tolerance`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.scenario_file import BadScenario, Measured, ScenarioFile, read_scenarios
from tests.bench.simulated_split import Prediction, predict
from tests.load.figures import table

SCENARIOS = Path(__file__).with_name("scenarios.json")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 for a bad file or a prediction that is off."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("scenarios", nargs="?", type=Path, default=SCENARIOS, help="JSON file")
    parser.add_argument(
        "--check", type=Path, metavar="MEASURED", help="compare with the speeds measured in a file"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="largest relative error of --check"
    )
    flags = parser.parse_args(arguments)
    try:
        scenarios = read_scenarios(flags.check or flags.scenarios)
    except BadScenario as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    if flags.check is None:
        print(_predictions(scenarios))
        return 0
    return _check(scenarios, flags.tolerance)


_FIGURES = (
    *("tok/s", "steps", "tokens a round", "round ms", "verify ms", "draft ms"),
    *("wait ms", "prompts ms", "first token ms"),
)


def _predictions(scenarios: ScenarioFile) -> str:
    rows = [(name, *_figures(predict(scenario))) for name, scenario in scenarios.named]
    return table(("scenario", *_FIGURES), rows)


def _figures(prediction: Prediction) -> tuple[str, ...]:
    return (
        f"{prediction.tokens_per_s:.1f}",
        str(prediction.num_steps),
        f"{prediction.round_tokens:.2f}",
        f"{prediction.round_ms:.2f}",
        f"{prediction.verify_ms:.2f}",
        f"{prediction.draft_ms:.2f}",
        f"{prediction.wait_ms:.2f}",
        f"{prediction.prompts_ms:.2f}",
        f"{prediction.first_token_ms:.0f}",
    )


def _check(scenarios: ScenarioFile, tolerance: float) -> int:
    if not scenarios.measured:
        print("simulate: no scenario has measured_tokens_per_s", file=sys.stderr)
        return 1
    errors = [_error(measured) for measured in scenarios.measured]
    rows = [
        (
            measured.name,
            f"{measured.tokens_per_s:.1f}",
            f"{100 * error:+.1f} %",
            *_figures(predict(measured.scenario)),
        )
        for measured, error in zip(scenarios.measured, errors, strict=True)
    ]
    print(table(("scenario", "measured tok/s", "error", *_FIGURES), rows))
    sizes = [abs(error) for error in errors]
    print(f"off by {statistics.mean(sizes):.1%} on average, {max(sizes):.1%} at worst")
    return int(any(abs(error) > tolerance for error in errors))


def _error(measured: Measured) -> float:
    return predict(measured.scenario).tokens_per_s / measured.tokens_per_s - 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
