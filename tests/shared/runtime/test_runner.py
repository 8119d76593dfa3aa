"""On a CPU a sequence's logits have the same bits whatever shares its forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 8
TOKEN_IDS = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(0)).tolist()
PAGES = range(1, 13)
OTHER_PAGES = range(13, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    return ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 25, CPU))


def rows(
    start: int, num_rows: int, pages: Sequence[int], logit_rows: Sequence[int] | None = None
) -> SequenceRows:
    end = start + num_rows
    return SequenceRows.causal(
        TOKEN_IDS[start:end], start, pages, range(num_rows) if logit_rows is None else logit_rows
    )


def run(runner: ModelRunner, *sequences: SequenceRows) -> Tensor:
    return runner.run(build_batch(sequences, page_size=PAGE_SIZE, device=CPU)).logits


def test_chunks_of_any_size_give_the_same_bits(folder: Path, runner: ModelRunner) -> None:
    one_by_one = torch.cat([run(runner, rows(i, 1, PAGES)) for i in range(90)])
    decoder = runner.decoder
    for chunk in (2, 5, 9, 30, 90):
        fresh = ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 25, CPU))
        parts = [run(fresh, rows(i, min(chunk, 90 - i), PAGES)) for i in range(0, 90, chunk)]
        assert torch.equal(torch.cat(parts), one_by_one)


def test_another_sequence_in_the_batch_leaves_the_bits(runner: ModelRunner) -> None:
    run(runner, rows(0, 20, PAGES))
    run(runner, rows(0, 33, OTHER_PAGES))
    alone = run(runner, rows(20, 3, PAGES))
    together = run(runner, rows(33, 7, OTHER_PAGES), rows(20, 3, PAGES))
    assert torch.equal(together[7:], alone)


def test_logit_rows_are_chosen_in_order(runner: ModelRunner) -> None:
    everything = run(runner, rows(0, 6, PAGES))
    assert torch.equal(run(runner, rows(0, 6, PAGES, [4, 1])), everything[[4, 1]])


def test_forward_without_logit_rows_returns_none(runner: ModelRunner) -> None:
    assert run(runner, rows(0, 6, PAGES, [])).shape == (0, 258)


def test_pool_of_another_shape_is_refused(runner: ModelRunner) -> None:
    layout = runner.decoder.kv_layout(PAGE_SIZE)
    wrong = type(layout)(layout.num_layers + 1, 2, 8, PAGE_SIZE, torch.float32)
    with pytest.raises(AssertionError, match="does not fit the decoder"):
        ModelRunner(runner.decoder, KvPool(wrong, 4, CPU))
