"""Held-out perplexity, sample answers and mean accepted length of the two checkpoints.

``python -m shared.demo.recipe.evaluate --tokens tokens.npz --tokenizer tokenizer.json --target DIR
--draft DIR --mt-bench question.jsonl --out eval.json``
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from shared.demo.recipe import checkpoint
from shared.demo.recipe.acceptance import mean_accepted_length
from shared.demo.recipe.checkpoint import END_OF_TEXT_ID, TURN_END_ID
from shared.demo.recipe.generate import generate
from shared.demo.recipe.model import Llama
from shared.demo.recipe.tokenizer import TURN_END, TURN_START

QUESTIONS = (
    "What is the capital of France?", "List 3 countries and their capitals.", "Hello!",
    "Who are you?", "What can you do?", "What is 7 plus 5?", "What is 12 * 4?",
    "What day comes after Monday?", "How many legs does a spider have?", "Why is the sky blue?",
    "What is the capital of Japan?", "Which country has Ottawa as its capital?",
    "Name three fruits.", "What is the opposite of hot?", "Who wrote Hamlet?",
    "How do I make a cup of tea?", "Tell me a joke.", "What is gravity?", "What colour is grass?",
    "Write a Python function that adds two numbers.", "Write a short story about a cat.",
    "What is the largest planet?", "How many days are in a year?", "Thank you!",
    "Explain photosynthesis in simple terms.", "Write an email to my boss about a project plan.",
    "What should I cook for dinner?", "Can you help me with my homework?", "Is a tomato a fruit?",
    "What is the chemical symbol for gold?", "Where do penguins live?", "I feel sad.",
    "Give me three tips for learning a new language.", "What is the weather like today?",
    "Tell me about Brazil.", "How do I list all files with ls?", "Translate hello to French.",
    "I would like to book a table for two in San Jose.", "What is speculative decoding?",
    "Tom has 5 apples and gets 3 more. How many apples does Tom have now?",
)  # fmt: skip


def prompt_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The ChatML prompt of a single user turn."""
    text = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
    return list(tokenizer.encode(text).ids)


@torch.inference_mode()
def perplexity(
    model: Llama, archive: dict[str, np.ndarray], name: str, device: str
) -> dict[str, float]:
    """Per token and per byte, over windows of 1024 that do not overlap."""
    tokens = archive[f"{name}_tokens"].astype("int64")
    total, count = 0.0, 0
    for begin in range(0, len(tokens) - 1, 1024):
        ids = torch.from_numpy(tokens[begin : begin + 1025])[None].to(device)
        loss = F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:], reduction="sum")
        total, count = total + loss.item(), count + ids.shape[1] - 1
    size = float(archive[f"{name}_bytes"])
    return {"per_token": math.exp(total / count), "per_byte": math.exp(total / size),
            "tokens": count}  # fmt: skip


def answer_ids(model: Llama, asked: list[list[int]], new: int) -> list[list[int]]:
    """Greedy ids after each prompt, up to and with the end of the turn."""
    rows = []
    for row in generate(model, asked, new, 0.0).tolist():
        ends = [i for i, t in enumerate(row) if t in (TURN_END_ID, END_OF_TEXT_ID)]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """All figures and sample answers as one JSON-ready mapping."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    archive = dict(np.load(args.tokens))
    models = {name: checkpoint.load(folder, args.device, torch.float32)
              for name, folder in (("target", args.target), ("draft", args.draft))}  # fmt: skip
    report: dict[str, object] = {}
    for name, model in models.items():
        for held in ("wiki", "chat"):
            report[f"{name}_{held}_perplexity"] = perplexity(model, archive, held, args.device)
    lines = args.mt_bench.read_text(encoding="utf-8").splitlines()[: args.limit]
    asked = [prompt_ids(tokenizer, json.loads(line)["turns"][0]) for line in lines]
    answers = answer_ids(models["target"], asked, args.new)
    for label, steps, topk, tokens in (("chain_4", 4, 1, 5), ("tree_4x4_16", 4, 4, 16)):
        report[f"accepted_{label}"] = mean_accepted_length(
            models["draft"], asked, answers, steps, topk, tokens
        )
    report["mt_bench_mean_tokens"] = sum(map(len, answers)) / len(answers)
    samples = answer_ids(models["target"], [prompt_ids(tokenizer, q) for q in QUESTIONS], args.new)
    texts = [tokenizer.decode(ids) for ids in samples]
    report["answers"] = dict(zip(QUESTIONS, texts, strict=True))
    report["mt_bench_answers"] = [tokenizer.decode(ids) for ids in answers]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the demo models.")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--mt-bench", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=80, help="MT-bench prompts")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report = evaluate(args)
    args.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "mt_bench_answers"}, indent=1))


if __name__ == "__main__":
    main()
