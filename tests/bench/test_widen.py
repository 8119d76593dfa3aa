"""Wide models compute what the small ones do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.config_file import CONFIG_FILE
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.dflash import load_dflash
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from tests.bench import widen
from tests.bench.wide_folders import is_written
from tests.bench.wide_head import WideHead, WideHeadShape
from tests.bench.wide_model import INDEX_FILE, WideModel, WideShape
from tests.bench.widening import Axis, CannotWiden, head_copies, shares_of
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
SMALL = TinyShape(vocab_size=64)
WIDE = WideShape(
    hidden_size=96, num_layers=5, num_heads=16, num_kv_heads=4, intermediate_size=200, vocab_size=90
)
TOKENS = list(range(5, 35))
SPARE = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small"), shape=SMALL)


def _rows() -> SequenceRows:
    count = len(TOKENS)
    return SequenceRows(TOKENS, range(count), 0, (1, 2), 0, None, range(count))


def _run(decoder: Decoder, layers: tuple[int, ...] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
    runner = ModelRunner(decoder, KvPool(decoder.kv_layout(16), 3, CPU))
    batch = build_batch([_rows()], page_size=16, device=CPU)
    output = runner.run(batch, capture_layers=layers)
    return output.logits, output.features


def _wide(folder: Path, shape: WideShape = WIDE) -> WideModel:
    return WideModel(folder, shape, spare_token=SPARE, device=CPU)


def _load(folder: Path) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device=CPU)


def _is_wider(found: Tensor, expected: Tensor) -> None:
    """Checks logits of all tokens; further ones have those of the spare token."""
    size = expected.shape[1]
    torch.testing.assert_close(found[:, :size], expected, atol=5e-5, rtol=1e-5)
    spare = expected[:, SPARE].unsqueeze(1).expand(-1, found.shape[1] - size)
    torch.testing.assert_close(found[:, size:], spare, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [(False, False), (True, False), (True, True)])
def test_logits_are_those_of_the_small_model(
    family: str, tied: tuple[bool, bool], tmp_path: Path
) -> None:
    shape = replace(SMALL, tie_word_embeddings=tied[0])
    folder = write_checkpoint(tmp_path, family, shape)
    wide = _wide(folder, replace(WIDE, tie_word_embeddings=tied[1]))
    expected, states = _run(_load(folder), (0, 2, 3))
    found, wide_states = _run(wide.decoder(dtype=torch.float32), (0, 2, 3))
    _is_wider(found, expected)
    # Of the spare token and its copies any may come first: a product may round each differently.
    assert torch.equal(found[:, : expected.shape[1]].argmax(-1), expected.argmax(-1))
    for state, wide_state in zip(states, wide_states, strict=True):
        torch.testing.assert_close(wide_state, state.repeat(1, 3), atol=1e-4, rtol=1e-5)


def test_query_heads_may_have_unequal_copies(small: Path) -> None:
    expected, _ = _run(_load(small))
    found, _ = _run(_wide(small, replace(WIDE, num_heads=12)).decoder(dtype=torch.float32))
    _is_wider(found, expected)


def test_sizes_are_the_wide_ones_and_further_layers_are_at_work(small: Path) -> None:
    decoder = _wide(small).decoder(dtype=torch.float32)
    assert decoder.config.num_layers == len(decoder.layers) == 5
    assert decoder.embedding.shape == (90, 96)
    shape = decoder.layers[0].attention.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (16, 4, 8)
    further = decoder.layers[4]
    assert float(further.mlp.gate_up.dense().abs().min()) > 0.0
    assert not further.mlp.down.dense().any()
    assert not further.attention.output.dense().any()


def test_whole_columns_would_change_the_logits(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without shares the copies are added up several times."""
    monkeypatch.setattr(Axis, "shared", lambda axis: axis)
    expected, _ = _run(_load(small))
    found, _ = _run(_wide(small).decoder(dtype=torch.float32))
    assert not torch.allclose(found[:, :64], expected, atol=1.0)


def test_written_shards_load_as_any_checkpoint(small: Path, tmp_path: Path) -> None:
    wide = _wide(small)
    wide.write(tmp_path / "wide", dtype=torch.float32, shard_size_bytes=50_000)
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 3
    found, _ = _run(_load(tmp_path / "wide"))
    assert torch.equal(found, _run(wide.decoder(dtype=torch.float32))[0])


@pytest.mark.parametrize("count", range(1, 40))
def test_shares_are_powers_of_two_that_add_up_to_one(count: int) -> None:
    shares = shares_of(count)
    assert len(shares) == count
    assert sum(shares) == 1.0
    assert all(share.hex().startswith("0x1.0000000000000p") for share in shares)


@pytest.mark.parametrize(
    ("few", "many"),
    [
        *(((4, 1), (32, 8)), ((4, 2), (32, 8)), ((8, 2), (16, 8)), ((4, 4), (16, 4))),
        *(((4, 2), (8, 4)), ((4, 1), (40, 8))),
    ],
)
def test_query_heads_keep_their_key_head(few: tuple[int, int], many: tuple[int, int]) -> None:
    queries, keys = head_copies(few, many)
    assert len(queries.index) == many[0]
    assert len(keys.index) == many[1]
    group, wide_group = few[0] // few[1], many[0] // many[1]
    for place, query in enumerate(queries.index.tolist()):
        assert query // group == int(keys.index[place // wide_group])
    counts = queries.index.bincount(minlength=few[0]).tolist()
    assert sum(counts) == many[0]
    if wide_group % group == 0 or group % wide_group == 0:
        assert set(counts) == {many[0] // few[0]}
    else:
        assert counts == [16, 8, 8, 8]


def test_a_group_that_is_cut_must_be_cut_evenly() -> None:
    with pytest.raises(CannotWiden, match="groups of 6 query heads do not fit into groups of 4"):
        head_copies((6, 1), (8, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 80}, "hidden_size is 32; 80 is not a multiple"),
        ({"num_layers": 2}, "num_hidden_layers is 3; 2 is no widening"),
        ({"intermediate_size": 40}, "intermediate_size is 48; 40 is no widening"),
        ({"vocab_size": 60}, "vocab_size is 64; 60 is no widening"),
        ({"tie_word_embeddings": True}, "lm_head of its own"),
    ],
)
def test_sizes_that_do_not_fit_are_named(small: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(CannotWiden, match=message):
        _wide(small, replace(WIDE, **change))


HEADS = {
    "eagle": TinyHead(has_embedding=False, has_fc_bias=True),
    "eagle with an embedding": TinyHead(),
    "eagle3": TinyHead(kind="EAGLE3", draft_vocab_size=20, has_embedding=False),
    "eagle3 with norms": TinyHead(
        kind="EAGLE3", draft_vocab_size=20, has_fc_norms=True, has_input_norm=True
    ),
    "eagle3 with the target's head": TinyHead(kind="EAGLE3"),
}


def _head_logits(head: DraftHead, features: tuple[Tensor, ...]) -> Tensor:
    runner = HeadRunner(head, KvPool(head.kv_layout(16), 3, CPU))
    rows = torch.cat(features, dim=-1)
    projection = head.feature_spec.projection
    if projection is not None:
        rows = rows @ projection.T
    batch = build_batch([_rows()], page_size=16, device=CPU)
    return runner.logits(runner.states(batch, runner.fuse(rows)))


@pytest.mark.parametrize("name", HEADS)
def test_heads_score_what_the_small_ones_do(name: str, small: Path, tmp_path: Path) -> None:
    tiny = HEADS[name]
    kind = HeadKind(tiny.kind)
    target = _wide(small)
    target.write(tmp_path / "target", dtype=torch.float32, shard_size_bytes=10**9)
    folder = write_head(tmp_path / "head", tiny)
    has_map = tiny.draft_vocab_size is not None
    shape = WideHeadShape(intermediate_size=100, draft_vocab_size=40 if has_map else 80)
    wide_folder = WideHead(folder, target, shape, algorithm=tiny.kind).write(
        tmp_path / "wide", dtype=torch.float32
    )
    heads = [
        load_head(
            own, kind, TargetFolder(of, dtype=torch.float32, device=CPU),
            dtype=torch.float32, device=CPU,
        )
        for own, of in ((folder, small), (wide_folder, tmp_path / "target"))
    ]  # fmt: skip
    num_layers = SMALL.num_layers if kind is HeadKind.EAGLE3 else SMALL.num_layers + 1
    # Any states will do for the small head; EAGLE reads the last, which is no layer's input.
    layers = heads[0].feature_spec.layer_indices
    assert max(layers) <= num_layers
    generator = torch.Generator().manual_seed(1)
    states = tuple(torch.randn(len(TOKENS), 32, generator=generator) for _ in layers)
    if kind is HeadKind.EAGLE3:
        assert heads[1].feature_spec.layer_indices == layers
    expected = _head_logits(heads[0], states)
    found = _head_logits(heads[1], tuple(state.repeat(1, 3) for state in states))
    size = expected.shape[1]
    torch.testing.assert_close(found[:, :size], expected, atol=3e-5, rtol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_block_heads_keep_their_layers_of_the_target(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", shape=replace(SMALL, num_layers=6))
    folder = write_dflash(tmp_path / "head", TinyDflash())
    target = _wide(small, replace(WIDE, num_layers=9))
    target.write(tmp_path / "target", dtype=torch.float32, shard_size_bytes=10**9)
    shape = WideHeadShape(intermediate_size=100, draft_vocab_size=40)
    wide_folder = WideHead(folder, target, shape, algorithm="DFLASH").write(
        tmp_path / "wide", dtype=torch.float32
    )
    few, many = (
        load_dflash(
            own, TargetFolder(of, dtype=torch.float32, device=CPU), dtype=torch.float32, device=CPU
        )
        for own, of in ((folder, small), (wide_folder, tmp_path / "target"))
    )
    assert many.feature_spec.layer_indices == few.feature_spec.layer_indices
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(6, 32, generator=generator)
    pools = [KvPool(each.kv_layout(16), 3, CPU) for each in (few, many)]
    positions = torch.arange(6)
    num_features = len(few.feature_spec.layer_indices)
    for each, pool, rows in zip((few, many), pools, (states, states.repeat(1, 3)), strict=True):
        features = torch.cat([rows] * num_features, dim=-1)
        projection = each.feature_spec.projection
        assert projection is not None
        each.write_context(features @ projection.T, positions, positions + 16, pool)
    copies = pools[1].keys[0].shape[1] // pools[0].keys[0].shape[1]
    for narrow, wide in zip(pools[0].keys, pools[1].keys, strict=True):
        assert narrow.abs().max() > 0
        torch.testing.assert_close(wide, narrow.repeat(1, copies, 1), atol=2e-5, rtol=1e-5)


def test_what_is_whole_is_kept(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = tmp_path / "wide"
    monkeypatch.setitem(widen.SHAPES, "8b", WIDE)
    arguments = ["widen", "--model", str(small), "--out", str(wide), "--device", "cpu", "--keep"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert widen.main() == 0
    assert is_written(wide)
    (wide / CONFIG_FILE).write_text("{}")
    assert widen.main() == 0
    assert (wide / CONFIG_FILE).read_text() == "{}"
    # As a program leaves it that is ended before all is written.
    (wide / INDEX_FILE).unlink()
    assert widen.main() == 0
    assert "hidden_size" in (wide / CONFIG_FILE).read_text()
