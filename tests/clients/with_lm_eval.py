"""lm-eval: `local-completions` on the tasks beside this file, with prompts sent as token ids.

The samples it logs are for `likelihoods.py`, which computes them anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
OUTPUT = Path(os.environ["HOME"]) / "lm_eval"


def main() -> None:
    model = {
        "model": "demo",
        "base_url": os.environ["OUTRIDER_URL"] + "/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": os.environ["OUTRIDER_TOKENIZER"],
        "tokenized_requests": "True",
        "num_concurrent": "2",
    }
    tasks = ("outrider_capitals", "outrider_capital_names", "outrider_sentences")
    command = [
        *(str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--include_path", str(TASKS), "--tasks", ",".join(tasks)),
        *("--output_path", str(OUTPUT), "--log_samples"),
    ]
    subprocess.run(command, check=True, cwd=TASKS)  # the tasks name their data without a folder
    [report] = OUTPUT.rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    assert results["outrider_capitals"]["acc,none"] == 1.0
    assert results["outrider_capital_names"]["exact_match,none"] == 1.0
    assert results["outrider_sentences"]["word_perplexity,none"] > 1.0
    print(f"{len(tasks)} tasks")


if __name__ == "__main__":
    main()
