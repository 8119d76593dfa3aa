"""`make bench`: everything that one host's GPUs show, else the demo through the serving path.

On a GPU: the engine with a trained pair at the size of an 8B (`wide`), forwards, prefill and rounds
beside their floors (`gpu`), what the host adds to steps (`engine_gpu`), and with a second GPU the
model on both (`tensor_parallel`). Each has a process of its own, since one would leave the next one
too little memory. The parts of a start are `make bench-start`.

Flags belong to the serving path, `python -m tests.bench`, so any of them chooses it.
"""

from __future__ import annotations

import subprocess
import sys

import torch

ONE_GPU = ("wide", "gpu", "engine_gpu")
TWO_GPUS = "tensor_parallel"


def gpu_benches(num_gpus: int) -> tuple[str, ...]:
    """Returns the programs of `tests.bench` that so many GPUs can run."""
    if num_gpus == 0:
        return ()
    return ONE_GPU if num_gpus == 1 else (*ONE_GPU, TWO_GPUS)


def main() -> int:
    benches = () if sys.argv[1:] else gpu_benches(torch.cuda.device_count())
    if not benches:
        from tests.bench import __main__ as serving

        return serving.main()
    exit_code = 0
    for name in benches:
        print(f"== {name}", flush=True)
        # The others are worth having where one fails.
        ended = subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False)
        exit_code = exit_code or ended.returncode
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
