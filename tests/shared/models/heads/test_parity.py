"""Draft heads against a plainly written oracle, on the same random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.config import HeadKind
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head, read_token_map
from shared.models.heads.target_tensors import TargetFolder
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.draft_heads import TinyHead, head_config, head_tensors, save_head, write_head
from tests.helpers.head_oracle import HeadOracle
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE = 4
TARGET_SHAPE = TinyShape(vocab_size=64, num_layers=6)
EAGLE = TinyHead()
EAGLE3 = TinyHead(kind="EAGLE3", draft_vocab_size=20, has_embedding=False)
HEADS = {
    "eagle": EAGLE,
    "eagle with the target's embedding": TinyHead(has_embedding=False),
    "eagle with a bias": TinyHead(has_fc_bias=True),
    "eagle3": EAGLE3,
    "eagle3 with the target's vocabulary": TinyHead(kind="EAGLE3", has_embedding=False),
    "eagle3 of another width": TinyHead(
        kind="EAGLE3", hidden_size=24, head_dim=6, draft_vocab_size=20
    ),
    "eagle3 with a bias": TinyHead(kind="EAGLE3", draft_vocab_size=20, has_fc_bias=True),
    "eagle3.1 layer norms": TinyHead(
        kind="EAGLE3", draft_vocab_size=20, has_fc_norms=True, config={"norm_output": True}
    ),
    "eagle3.1 joint norm": TinyHead(
        kind="EAGLE3", draft_vocab_size=20, has_input_norm=True, config={"norm_output": True}
    ),
    "eagle3 norm before residual": TinyHead(
        kind="EAGLE3", draft_vocab_size=20, config={"norm_before_residual": True}
    ),
    "eagle3 of 2 layers": TinyHead(
        kind="EAGLE3",
        draft_vocab_size=20,
        num_features=2,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5]}},
    ),
}
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 60]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), shape=TARGET_SHAPE)


def _load(
    folder: Path, head: TinyHead, target: Path, *, suffix: str = "safetensors", **options: Any
) -> DraftHead:
    write_head(folder, head, suffix=suffix)
    tensors = TargetFolder(target, dtype=torch.float32, device=CPU)
    kind = HeadKind(head.kind)
    return load_head(folder, kind, tensors, dtype=torch.float32, device=CPU, **options)


def _oracle(head: TinyHead, **options: Any) -> HeadOracle:
    target = build_model("llama", TARGET_SHAPE).state_dict()
    return HeadOracle(
        head,
        head_tensors(head),
        target_embedding=target["model.embed_tokens.weight"],
        target_lm_head=target["lm_head.weight"],
        feeds_back_norm=bool(head.config.get("norm_output")),
        norm_before_residual=bool(head.config.get("norm_before_residual")),
        **options,
    )


def _features(head: TinyHead, num_rows: int, seed: int = 0) -> Tensor:
    width = head.target_hidden_size * (head.num_features if head.kind == "EAGLE3" else 1)
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def _sent(head: DraftHead, features: Tensor) -> Tensor:
    """What the target sends: it applies the projection it was given."""
    projection = head.feature_spec.projection
    rows = features if projection is None else features @ projection.T
    assert rows.shape[1] == head.feature_spec.width
    return rows


class Output(NamedTuple):
    logits: Tensor
    states: Tensor


def _runner(head: DraftHead) -> HeadRunner:
    return HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 20, CPU))


def _run(
    runner: HeadRunner,
    tokens: Sequence[int],
    hidden: Tensor,
    *,
    start: int = 0,
    positions: Sequence[int] | None = None,
    prefix_length: int | None = None,
    tail_mask: Sequence[Sequence[bool]] | None = None,
) -> Output:
    rows = SequenceRows(
        token_ids=tokens,
        positions=positions or range(start, start + len(tokens)),
        kv_start=start,
        pages=range(1, 11),
        prefix_length=start if prefix_length is None else prefix_length,
        tail_mask=tail_mask,
        logit_rows=range(len(tokens)),
    )
    states = runner.states(build_batch([rows], page_size=PAGE_SIZE, device=CPU), hidden)
    return Output(runner.logits(states), states)


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_scores_as_the_oracle_says(name: str, tmp_path: Path, target_folder: Path) -> None:
    tiny = HEADS[name]
    head, oracle = _load(tmp_path, tiny, target_folder), _oracle(tiny)
    features = _features(tiny, len(TOKENS) - 1)
    runner = _runner(head)
    output = _run(runner, TOKENS[1:], runner.fuse(_sent(head, features)))
    states = oracle.states(TOKENS[1:], oracle.fuse(features))
    _close(output.states, states)
    _close(output.logits, oracle.logits(states))


@pytest.mark.parametrize("tiny", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
@pytest.mark.parametrize("cuts", [(10,), (1,) * 10, (3, 4, 3), (7, 1, 2)], ids=str)
def test_any_cutting_of_a_prompt_gives_the_same_logits(
    tiny: TinyHead, cuts: tuple[int, ...], tmp_path: Path, target_folder: Path
) -> None:
    head, oracle = _load(tmp_path, tiny, target_folder), _oracle(tiny)
    features = _features(tiny, len(TOKENS) - 1)
    runner = _runner(head)
    hidden = runner.fuse(_sent(head, features))
    outputs, start = [], 0
    for count in cuts:
        part = slice(start, start + count)
        outputs.append(_run(runner, TOKENS[1:][part], hidden[part], start=start).logits)
        start += count
    _close(torch.cat(outputs), oracle.logits(oracle.states(TOKENS[1:], oracle.fuse(features))))


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1 layer norms"])
def test_tree_rows_read_the_state_of_their_parent(
    name: str, tmp_path: Path, target_folder: Path
) -> None:
    tiny = HEADS[name]
    head, oracle = _load(tmp_path, tiny, target_folder), _oracle(tiny)
    features = _features(tiny, len(TOKENS) - 1)
    runner, base = _runner(head), len(TOKENS) - 1
    root = _run(runner, TOKENS[1:], runner.fuse(_sent(head, features))).states[-1:]
    first = _run(
        runner,
        [11, 12],
        root.expand(2, -1),
        start=base,
        positions=[base, base],
        tail_mask=[[True, False], [False, True]],
    )
    second = _run(
        runner,
        [21, 22],
        first.states[[1, 0]],
        start=base + 2,
        positions=[base + 1, base + 1],
        prefix_length=base,
        tail_mask=[[False, True, True, False], [True, False, False, True]],
    )
    paths = [[11], [12], [12, 21], [11, 22]]
    for logits, path in zip([*first.logits, *second.logits], paths, strict=True):
        _close(logits, oracle.continue_path(TOKENS, features, path))


@pytest.mark.parametrize("tiny", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_pickled_weights_load_like_safetensors(
    tiny: TinyHead, tmp_path: Path, target_folder: Path
) -> None:
    heads = [
        _load(tmp_path / suffix, tiny, target_folder, suffix=suffix)
        for suffix in ("bin", "safetensors")
    ]
    features = _features(tiny, 10)
    logits = []
    for head in heads:
        runner = _runner(head)
        logits.append(_run(runner, TOKENS[1:], runner.fuse(_sent(head, features))).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("suffix", ["json", "pt", "safetensors"])
def test_a_token_map_cuts_the_lm_head(suffix: str, tmp_path: Path, target_folder: Path) -> None:
    token_map = [40, 3, 17, 60, 0]
    path = tmp_path / f"map.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(token_map))
    elif suffix == "pt":
        torch.save(token_map, path)
    else:
        save_file({"map": torch.tensor(token_map)}, path)
    read = read_token_map(path, 64)
    head = _load(tmp_path / "head", EAGLE, target_folder, token_map=read)
    assert head.vocabulary.size == 5
    oracle, features = _oracle(EAGLE, token_map=token_map), _features(EAGLE, 10)
    actual = _run(_runner(head), TOKENS[1:], features).logits
    _close(actual, oracle.logits(oracle.states(TOKENS[1:], features)))
    assert (actual > -torch.inf).sum(1).tolist() == [5] * 10


def test_every_switch_changes_the_oracle(target_folder: Path, tmp_path: Path) -> None:
    """The negative control: an oracle that ignores a switch does not agree."""
    tiny = HEADS["eagle3.1 layer norms"]
    head = _load(tmp_path, tiny, target_folder)
    oracle = _oracle(tiny)
    oracle.feeds_back_norm = False
    features = _features(tiny, 10)
    runner = _runner(head)
    states = _run(runner, TOKENS[1:], runner.fuse(_sent(head, features))).states
    assert not torch.allclose(states, oracle.states(TOKENS[1:], oracle.fuse(features)), atol=1e-2)


@pytest.mark.parametrize(
    ("head", "layers", "width", "projects"),
    [
        (EAGLE, (7,), 32, False),
        (EAGLE3, (2, 3, 3), 32, True),
        (HEADS["eagle3 of 2 layers"], (3, 5), 32, True),
        (HEADS["eagle3.1 layer norms"], (2, 3, 3), 96, False),
        (HEADS["eagle3 with a bias"], (2, 3, 3), 96, False),
        (
            TinyHead(
                kind="EAGLE3",
                config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}},
            ),
            (2, 3, 6),
            32,
            True,
        ),
    ],
)
def test_the_head_says_which_features_it_reads(
    head: TinyHead,
    layers: tuple[int, ...],
    width: int,
    projects: bool,
    tmp_path: Path,
    target_folder: Path,
) -> None:
    spec = _load(tmp_path, head, target_folder).feature_spec
    assert (spec.layer_indices, spec.width) == (layers, width)
    assert (spec.projection is not None) == projects


def test_a_tied_target_lends_its_embedding_twice(tmp_path: Path) -> None:
    shape = TinyShape(vocab_size=64, tie_word_embeddings=True)
    target = TargetFolder(write_checkpoint(tmp_path, shape=shape), dtype=torch.float32, device=CPU)
    assert target.lm_head() is target.embedding()


def test_other_spellings_of_a_checkpoint_load(tmp_path: Path, target_folder: Path) -> None:
    tensors = head_tensors(EAGLE3)
    renamed = {
        key if key in ("lm_head.weight", "d2t", "t2d") else f"model.{key}": value
        for key, value in tensors.items()
    }
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in renamed.items()}
    (tmp_path / "config.json").write_text(json.dumps(head_config(EAGLE3)))
    save_head(tmp_path, renamed)
    target = TargetFolder(target_folder, dtype=torch.float32, device=CPU)
    head = load_head(tmp_path, HeadKind.EAGLE3, target, dtype=torch.float32, device=CPU)
    oracle, features = _oracle(EAGLE3), _features(EAGLE3, 10)
    output = _run(_runner(head), TOKENS[1:], head.fuse(_sent(head, features)))
    _close(output.states, oracle.states(TOKENS[1:], oracle.fuse(features)))
