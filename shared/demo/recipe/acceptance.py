"""Mean accepted length of the draft against the target's greedy text, chain or tree.

The target's greedy text does not depend on the draft, so it is generated once; the cycles of
speculation are then walked along it. Nothing here is fast: it measures checkpoints.
"""

from __future__ import annotations

import torch

from shared.demo.recipe.model import Llama

Path_ = tuple[int, ...]


@torch.inference_mode()
def best_next(
    draft: Llama, rows: list[list[int]], topk: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The ``topk`` best next ids of every row, and their log-probabilities."""
    device = draft.model.embed_tokens.weight.device
    longest = -(-max(map(len, rows)) // 64) * 64
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    # Rows are padded on the right: under the causal mask the pads change nothing before them.
    logits = draft(ids.to(device))[torch.arange(len(rows), device=device), last]
    top = logits.float().log_softmax(-1).topk(topk)
    return top.indices.tolist(), top.values.tolist()


def propose(draft: Llama, rows: list[list[int]], steps: int, topk: int, tokens: int) -> list[
    set[Path_]
]:  # fmt: skip
    """Drafted paths after every row: ``tokens - 1`` nodes of the best-scored tree.

    In each step the ``topk`` best nodes of the last level are expanded by ``topk`` children;
    with ``topk`` 1 this is a chain of ``steps`` tokens.
    """
    beams: list[list[tuple[float, Path_]]] = [[(0.0, ())] for _ in rows]
    trees: list[list[tuple[float, Path_]]] = [[] for _ in rows]
    for _ in range(steps):
        flat = [row + list(path) for row, beam in zip(rows, beams, strict=True) for _, path in beam]
        ids, scores = best_next(draft, flat, topk)
        at = 0
        for r, beam in enumerate(beams):
            level = []
            for score, path in beam:
                level += [(score + s, (*path, i)) for i, s in zip(ids[at], scores[at], strict=True)]
                at += 1
            trees[r] += level
            beams[r] = sorted(level, reverse=True)[:topk]
    # A child never scores above its parent, so the best nodes form a tree.
    return [{path for _, path in sorted(tree, reverse=True)[: tokens - 1]} for tree in trees]


def accepted(paths: set[Path_], truth: list[int]) -> int:
    """The number of next true tokens that the best drafted path holds."""
    depth = 0
    while depth < len(truth) and tuple(truth[: depth + 1]) in paths:
        depth += 1
    return depth


def mean_accepted_length(
    draft: Llama,
    prompts: list[list[int]],
    answers: list[list[int]],
    steps: int,
    topk: int,
    tokens: int,
) -> float:
    """Tokens gained a cycle (accepted plus bonus) over all prompts.

    ``answers`` are the target's greedy ids. The first comes out of the prefill and opens the first
    cycle; a cycle cut short by the end of the answer counts with what was left.
    """
    at = [1] * len(prompts)
    cycles = gained = 0
    while live := [i for i, answer in enumerate(answers) if at[i] < len(answer)]:
        rows = [prompts[i] + answers[i][: at[i]] for i in live]
        for i, paths in zip(live, propose(draft, rows, steps, topk, tokens), strict=True):
            rest = answers[i][at[i] :]
            step = min(accepted(paths, rest) + 1, len(rest))
            at[i], cycles, gained = at[i] + step, cycles + 1, gained + step
    return gained / max(cycles, 1)
