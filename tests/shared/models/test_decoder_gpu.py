"""On a GPU the decoder computes the logits of transformers, in chunks, plain steps and trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from shared.tokens import TokenTree
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE_SIZE = 16
PAGES = (5, 2, 9, 3, 7, 1, 8)
NUM_TOKENS = 100
TREE = TokenTree((1, 2, 3, 4, 5, 6, 7), (None, None, 0, 0, 2, 1, 4))
SHAPES = {
    "llama": TinyShape(
        hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=384
    ),
    "mistral": TinyShape(head_dim=32, overrides={"sliding_window": 24}),
    "qwen2": TinyShape(num_heads=6, num_kv_heads=2, head_dim=16),
    "qwen3": TinyShape(hidden_size=128, head_dim=128),
}
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def _runner(folder: Path, dtype: torch.dtype) -> ModelRunner:
    decoder = load_decoder(folder, dtype=dtype, device=CUDA)
    return ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 12, CUDA))


def _causal(runner: ModelRunner, token_ids: list[int], start: int) -> Tensor:
    rows = SequenceRows(
        token_ids=token_ids,
        positions=range(start, start + len(token_ids)),
        kv_start=start,
        pages=PAGES,
        prefix_length=start,
        tail_mask=None,
        logit_rows=range(len(token_ids)),
    )
    return runner.run(build_batch([rows], page_size=PAGE_SIZE, device=CUDA)).logits


def _tree(runner: ModelRunner, tree: TokenTree, start: int) -> Tensor:
    mask = [[other in tree.path(node) for other in range(len(tree))] for node in range(len(tree))]
    rows = SequenceRows(
        token_ids=tree.token_ids,
        positions=[start + depth - 1 for depth in tree.depths],
        kv_start=start,
        pages=PAGES,
        prefix_length=start,
        tail_mask=mask,
        logit_rows=range(len(tree)),
    )
    return runner.run(build_batch([rows], page_size=PAGE_SIZE, device=CUDA)).logits


def _tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (NUM_TOKENS,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("family", SHAPES)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    runner = _runner(write_checkpoint(tmp_path, family, SHAPES[family]), dtype)
    model, tokens = build_model(family, SHAPES[family]), _tokens()
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0].double()
    split = 70
    found = [_causal(runner, tokens[:split], 0)]
    found += [_causal(runner, [token], split + i) for i, token in enumerate(tokens[split:])]
    assert _error(torch.cat(found), exact, dtype) < LARGEST_ERROR[dtype]


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("family", SHAPES)
def test_tree_logits_are_those_of_its_paths(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    runner = _runner(write_checkpoint(tmp_path, family, SHAPES[family]), dtype)
    model, tokens = build_model(family, SHAPES[family]), _tokens()[:77]
    _causal(runner, tokens, 0)
    found = _tree(runner, TREE, len(tokens))
    rows = []
    for node in range(len(TREE)):
        path = [TREE.token_ids[each] for each in TREE.path(node)]
        with torch.no_grad():
            rows.append(model(torch.tensor([[*tokens, *path]])).logits[0, -1].double())
    assert _error(found, torch.stack(rows), dtype) < LARGEST_ERROR[dtype]


def _error(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest difference in float32, the relative norm of it in lower precision."""
    difference = found.double().cpu() - exact
    if dtype == torch.float32:
        return float(difference.abs().max())
    return float(difference.norm() / exact.norm())
