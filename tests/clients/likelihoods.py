"""Computes lm-eval's log-likelihoods anew: a plain forward of transformers, the same weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from gateway.settings import DEMO_MODEL
from services.draft.training.frozen_target import load_causal_model

# Sums of up to twenty log probabilities in float32, whose sums of products have another order.
_TOLERANCE = 1e-3


class Oracle:
    """The demo model without Outrider."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = load_causal_model(folder, torch.float32).eval()

    @torch.no_grad()
    def log_likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Returns the continuation's log probability and whether each token was the likeliest.

        Without a context the end token is it, as in lm-eval.
        """
        before = self._ids(context) if context else [self._tokenizer.eos_token_id]
        token_ids = before + self._ids(context + continuation)[len(before) if context else 0 :]
        log_probs = self._model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        wanted = torch.tensor(token_ids[len(before) :])
        log_probs = log_probs[len(before) - 1 : -1]
        total = log_probs.gather(1, wanted[:, None]).sum()
        return float(total), bool((log_probs.argmax(-1) == wanted).all())

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _choices(folder: Path) -> Iterator[tuple[str, str, float, bool]]:
    for sample in _samples(folder, "outrider_capitals"):
        for arguments, [(total, is_greedy)] in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            yield arguments["arg_0"], arguments["arg_1"], float(total), is_greedy == "True"


def _samples(folder: Path, task: str) -> list[dict]:
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(folder: Path) -> None:
    oracle = Oracle(DEMO_MODEL)
    differences = []
    for context, continuation, total, is_greedy in _choices(folder):
        expected, expected_greedy = oracle.log_likelihood(context, continuation)
        assert is_greedy == expected_greedy, (continuation, total, expected)
        differences.append(abs(total - expected))
    for sample in _samples(folder, "outrider_sentences"):
        [[total]] = sample["resps"]
        expected, _ = oracle.log_likelihood("", sample["doc"]["text"])
        differences.append(abs(float(total) - expected))
    assert len(differences) == 11
    assert max(differences) < _TOLERANCE, differences
    print(f"{len(differences)} log-likelihoods, at most {max(differences):.1e} off")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
