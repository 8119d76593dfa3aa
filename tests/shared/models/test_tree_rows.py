"""Tree rows under a tail mask compute what each path computes as a chain of its own."""

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
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.mixtures import MIXTURES

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES = [9, 4, 1, 7, 3, 8, 2, 6, 5]
PROMPT = [17, 203, 5, 88, 140, 61, 9]
ROOT = 42
TREE = TokenTree(
    token_ids=(10, 20, 30, 40, 50, 60),
    parent_indices=(None, 0, None, 0, 3, 2),
)


OVERRIDES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gemma3": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "llama4": {"num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layer_interval": 2},
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "step3p5": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "sliding_window": 6,
        "num_sliding_attention_heads": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "swiglu_limits": [0.0, 0.3, 0.0],
    },
    "qwen3_next": {
        **DELTA,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_5": DELTA,
    "deepseek_v3": MIXTURES["deepseek_v3"],
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture(scope="module", params=OVERRIDES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(overrides=OVERRIDES[request.param])
    return write_checkpoint(tmp_path_factory.mktemp("model"), request.param, shape)


def new_runner(folder: Path) -> ModelRunner:
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    return ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 10, CPU))


def run_causal(runner: ModelRunner, token_ids: list[int], start: int) -> Tensor:
    end = start + len(token_ids)
    rows = SequenceRows(
        token_ids, range(start, end), start, PAGES, start, None, range(len(token_ids))
    )
    return runner.run(build_batch([rows], page_size=PAGE_SIZE, device=CPU)).logits


def tree_rows(tree: TokenTree, nodes: range) -> SequenceRows:
    """Rows of the root (index 0 of the tail) and the tree's nodes behind it."""
    prefix = len(PROMPT)
    token_ids = [ROOT, *tree.token_ids]
    depths = [0, *tree.depths]
    masks = []
    for row in nodes:
        path = {0} if row == 0 else {0, *(node + 1 for node in tree.path(row - 1))}
        masks.append([index in path for index in range(nodes.stop)])
    return SequenceRows(
        token_ids=[token_ids[row] for row in nodes],
        positions=[prefix + depths[row] for row in nodes],
        kv_start=prefix + nodes.start,
        pages=PAGES,
        prefix_length=prefix,
        tail_mask=masks,
        logit_rows=range(len(nodes)),
    )


def run_tree(runner: ModelRunner, nodes: range) -> Tensor:
    batch = build_batch([tree_rows(TREE, nodes)], page_size=PAGE_SIZE, device=CPU)
    return runner.run(batch).logits


def chain_logits(folder: Path, node: int) -> Tensor:
    """Returns the logits after the path to `node`, computed token by token."""
    runner = new_runner(folder)
    run_causal(runner, PROMPT, 0)
    path = [ROOT, *(TREE.token_ids[index] for index in TREE.path(node))]
    rows = [run_causal(runner, [token], len(PROMPT) + step)[0] for step, token in enumerate(path)]
    return rows[-1]


def test_every_node_has_the_logits_of_its_own_chain(folder: Path) -> None:
    runner = new_runner(folder)
    run_causal(runner, PROMPT, 0)
    logits = run_tree(runner, range(len(TREE) + 1))
    for node in range(len(TREE)):
        assert torch.equal(logits[node + 1], chain_logits(folder, node))


def test_tree_grown_level_by_level_equals_the_tree_at_once(folder: Path) -> None:
    at_once, grown = new_runner(folder), new_runner(folder)
    for runner in (at_once, grown):
        run_causal(runner, PROMPT, 0)
    expected = run_tree(at_once, range(7))
    levels = [run_tree(grown, nodes) for nodes in (range(1), range(1, 4), range(4, 7))]
    assert torch.equal(torch.cat(levels), expected)


def test_accepted_path_continues_after_it_is_moved_to_the_front(folder: Path) -> None:
    runner = new_runner(folder)
    run_causal(runner, PROMPT, 0)
    run_tree(runner, range(len(TREE) + 1))
    accepted = TREE.path(4)
    start = len(PROMPT) + 1
    runner.pool.move(slots([start + node for node in accepted]), slots(range(start, start + 3)))
    after = run_causal(runner, [77], start + len(accepted))
    chain = new_runner(folder)
    run_causal(chain, [*PROMPT, ROOT, *(TREE.token_ids[node] for node in accepted)], 0)
    assert torch.equal(after, run_causal(chain, [77], start + len(accepted)))


def slots(indices: list[int] | range) -> Tensor:
    return torch.tensor([PAGES[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in indices])
