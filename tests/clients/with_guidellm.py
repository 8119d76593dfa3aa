"""GuideLLM: a run to its end, and the acceptance its report keeps of every request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL = os.environ["OUTRIDER_URL"]
NUM_REQUESTS = 8
REPORT = Path("guidellm.json")


def main() -> None:
    extras = json.dumps({"body": {"speculation": {"num_steps": 3}}})
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={URL},model=demo,extras={extras}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['OUTRIDER_TOKENIZER']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=32"),
        *("--output", f"kind=json,path={REPORT}"),
    ]
    subprocess.run(command, check=True)
    [benchmark] = json.loads(REPORT.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (NUM_REQUESTS, [])
    assert all(request["output_tokens"] == 32 for request in requests["successful"])
    assert benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"] > 0

    told = [each["response_metrics"]["speculative_decoding"] for each in requests["successful"]]
    # Null is a request whose trees all came too late, as they may on a busy machine.
    speculation = [each for each in told if each is not None]
    rounds = sum(each["num_spec_steps"] for each in speculation)
    accepted = sum(each["num_accepted_draft_tokens"] for each in speculation)
    drafted = sum(each["num_draft_tokens"] for each in speculation)
    assert 0 < accepted <= drafted
    share = 100 * accepted / drafted
    print(f"{1 + accepted / rounds:.2f} tokens a round, {share:.0f} % of draft tokens accepted")


if __name__ == "__main__":
    main()
