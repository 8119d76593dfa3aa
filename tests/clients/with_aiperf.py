"""AIPerf: a run to its end, and the acceptance it reports, from answers and from `/metrics`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

URL = os.environ["OUTRIDER_URL"]
NUM_REQUESTS = 8
OUTPUT = Path("aiperf")


def main() -> None:
    command = [
        *(str(Path(sys.executable).parent / "aiperf"), "profile"),
        *("--model", "demo", "--url", URL, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", os.environ["OUTRIDER_TOKENIZER"]),
        *("--concurrency", "2", "--request-count", str(NUM_REQUESTS), "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "32"),
        *("--extra-inputs", json.dumps({"ignore_eos": True, "speculation": {"num_steps": 3}})),
        *("--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", str(OUTPUT)),
    ]
    # HF_HUB_OFFLINE makes AIPerf look for the folder of the tokenizer in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, env=environment)
    report = json.loads((OUTPUT / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report["error_summary"]
    assert report["is_complete"]

    rounds = report["total_spec_decode_steps"]["avg"]
    accepted = report["total_accepted_draft_tokens"]["avg"]
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == rounds > 0
    assert sum(int(length) * count for length, count in histogram.items()) == accepted > 0
    length = report["spec_decode_token_weighted_acceptance_length"]["avg"]
    assert abs(length - (1 + accepted / rounds)) < 1e-6

    scraped = json.loads((OUTPUT / "server_metrics_export.json").read_text())["metrics"]
    assert _total(scraped, "vllm:spec_decode_num_drafts") == rounds
    assert _total(scraped, "vllm:spec_decode_num_accepted_tokens") == accepted
    rate = report["spec_decode_overall_draft_acceptance_rate"]["avg"]
    print(f"{length:.2f} tokens a round, {rate:.0f} % of draft tokens accepted")


def _total(scraped: dict[str, Any], name: str) -> float:
    [series] = scraped[name]["series"]
    return series["stats"]["total"]


if __name__ == "__main__":
    main()
