"""On a GPU the decoder computes the logits of transformers, in chunks, plain steps and trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from shared.tokens import TokenTree
from tests.helpers.checkpoints import DELTA, TinyShape, build_model, write_checkpoint

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
    "qwen3_5": TinyShape(head_dim=16, overrides=DELTA),
}
DTYPES = [torch.float32, torch.bfloat16]
LARGEST_FLOAT32_ERROR = 1e-3
# These models amplify rounding, so bfloat16 is measured against what it costs transformers.
LARGEST_ERROR_RATIO = 1.3


def _runner(folder: Path, dtype: torch.dtype) -> ModelRunner:
    decoder = load_decoder(folder, dtype=dtype, device=CUDA)
    return ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 12, CUDA))


def _causal(runner: ModelRunner, token_ids: list[int], start: int) -> Tensor:
    rows = SequenceRows.causal(token_ids, start, PAGES, range(len(token_ids)))
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SHAPES)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    runner = _runner(write_checkpoint(tmp_path, family, SHAPES[family]), dtype)
    model, tokens = build_model(family, SHAPES[family]), _tokens()
    paths = [tokens]
    split = 70
    found = [_causal(runner, tokens[:split], 0)]
    found += [_causal(runner, [token], split + i) for i, token in enumerate(tokens[split:])]
    exact, rounded = (_logits(each, paths)[0] for each in (model, _on_device(family, dtype)))
    _check(torch.cat(found), exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SHAPES)
def test_tree_logits_are_those_of_its_paths(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    runner = _runner(write_checkpoint(tmp_path, family, SHAPES[family]), dtype)
    model, tokens = build_model(family, SHAPES[family]), _tokens()[:77]
    _causal(runner, tokens, 0)
    found = _tree(runner, TREE, len(tokens))
    paths = [[*tokens, *(TREE.token_ids[each] for each in TREE.path(i))] for i in range(len(TREE))]
    exact, rounded = (
        torch.stack([logits[-1] for logits in _logits(each, paths)])
        for each in (model, _on_device(family, dtype))
    )
    _check(found, exact, rounded)


def _on_device(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return build_model(family, SHAPES[family]).to(device=CUDA, dtype=dtype)


@torch.no_grad()
def _logits(model: PreTrainedModel, paths: list[list[int]]) -> list[Tensor]:
    return [
        model(torch.tensor([path], device=model.device)).logits[0].double().cpu() for path in paths
    ]


def _check(found: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """Checks logits against exact ones; `rounded` are those of transformers in our dtype."""
    difference = found.double().cpu() - exact
    if float((rounded - exact).abs().max()) < LARGEST_FLOAT32_ERROR:
        assert float(difference.abs().max()) < LARGEST_FLOAT32_ERROR
    else:
        assert difference.norm() < LARGEST_ERROR_RATIO * (rounded - exact).norm()
