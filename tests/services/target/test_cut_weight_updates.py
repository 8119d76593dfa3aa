"""Weights of a target that processes hold together: all take an update, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from services.ranks import Ranks
from services.target.engine import Engine
from services.target.engine_factory import build_engine
from services.target.requests.admission import EventQueue
from services.target.requests.request import Finished
from services.target.settings import TargetSettings
from services.target.tensor_parallel import start_followers
from services.target.weight_control import WeightControl
from services.target.weight_stager import FollowingStager, RankCall, WeightStager
from services.target.weight_updates import WeightUpdates
from shared.errors import CheckpointError, FailedPrecondition
from shared.generation import Delta
from shared.model_options import LoadFormat, ModelOptions, Quantisation
from shared.models.heads.target_tensors import Table
from shared.tokens import SamplingParams, StopParams
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.engines import VOCAB_SIZE, request, tiny_decoder

SHAPE = TinyShape(vocab_size=VOCAB_SIZE)
TABLES = ((Table.EMBEDDING, "model.embed_tokens.weight"), (Table.LM_HEAD, "lm_head.weight"))
NAME = "model.layers.0.self_attn.o_proj.weight"
OF_THE_LAST = NAME.replace("0", "2")


@dataclass
class Cut:
    """An engine and its updates."""

    engine: Engine
    updates: WeightUpdates

    async def answer(self) -> list[int]:
        stream = EventQueue(asyncio.get_running_loop())
        sampling = SamplingParams(temperature=0.8, seed=4)
        self.engine.submit(request([1, 2, 3, 4, 5], sampling, StopParams(16)), stream, 0)
        tokens: list[int] = []
        while True:
            for _, event in await stream.next_batch():
                if isinstance(event, Delta):
                    tokens += event.token_ids
                if isinstance(event, Finished):
                    return tokens


@asynccontextmanager
async def _engine(
    folder: Path, ranks: Ranks, quantisation: Quantisation, *, spreads_sequences: bool = False
) -> AsyncIterator[Cut]:
    settings = replace(
        TargetSettings(
            model_path=folder, device="cpu", page_size=4, max_total_tokens=800, context_length=120
        ),
        tp_size=ranks.tp_size,
        pp_size=ranks.pp_size,
        quantization=quantisation,
        enable_dp_attention=spreads_sequences,
        dp_size=ranks.tp_size if spreads_sequences else 1,
    )
    others = None if ranks.size == 1 else start_followers(settings)
    engine = build_engine(settings, lambda report: None, others)
    engine.start()
    try:
        yield Cut(
            engine,
            WeightUpdates(
                engine, lambda: WeightStager(engine.decoder, folder, settings.model_options)
            ),
        )
    finally:
        engine.stop()
        if others is not None:
            others.stop()


async def _load(updates: WeightUpdates, folder: Path) -> None:
    await updates.load(b"what rank 1 cannot read", "lost")


async def _read(updates: WeightUpdates, folder: Path) -> None:
    await updates.read(folder / "what is not there", "auto", "lost")


async def _receive(updates: WeightUpdates, folder: Path) -> None:
    await updates.receive("a group without rank 1", (), "lost", is_flattened=False)


@pytest.mark.parametrize(
    ("ranks", "quantisation", "spreads_sequences"),
    [
        (Ranks(2), Quantisation.UNQUANT, False),
        (Ranks(2), Quantisation.INT8, False),
        (Ranks(2), Quantisation.INT8, True),
        (Ranks(1, 2), Quantisation.UNQUANT, False),
        (Ranks(2, 2), Quantisation.INT8, True),
    ],
)
async def test_all_processes_take_an_update_or_none(
    ranks: Ranks, quantisation: Quantisation, spreads_sequences: bool, tmp_path: Path
) -> None:
    old = write_checkpoint(tmp_path / "old", "llama", SHAPE, seed=3)
    new = write_checkpoint(tmp_path / "new", "llama", SHAPE, seed=4)
    expected = []
    for folder in (old, new):
        async with _engine(folder, Ranks(), quantisation) as whole:
            expected.append(await whole.answer())
    async with _engine(old, ranks, quantisation, spreads_sequences=spreads_sequences) as cut:
        assert await cut.answer() == expected[0]
        with pytest.raises(CheckpointError):
            await cut.updates.load(save({NAME: torch.zeros(1, 1)}), None)
        others = ", ".join(map(str, range(1, ranks.size)))
        gather = partial(WeightStager.read, folder=new, load_format=LoadFormat.AUTO)
        for fails in (_load, _read, _receive):
            with pytest.MonkeyPatch.context() as patch:
                # This process alone gathers the new weights, by whatever it is asked to do.
                for method in ("load", "read", "receive"):
                    patch.setattr(WeightStager, method, lambda stager, *_, **__: gather(stager))
                with pytest.raises(FailedPrecondition, match=f"rank {others} could not gather"):
                    await fails(cut.updates, tmp_path)
            assert await cut.answer() == expected[0]
        assert (await cut.updates.read(new, "auto", "step")) is not None
        assert await cut.answer() == expected[1]
        for table, key in TABLES:
            rows = cut.engine.with_weights(
                partial(
                    WeightControl.table_rows,
                    table=table,
                    start=3,
                    end=VOCAB_SIZE,
                    dtype=torch.float32,
                    num_updates=1,
                )
            )
            whole = load_file(new / "model.safetensors")[key]
            assert torch.equal(rows.result().read(), whole[3:]), "what drafts elsewhere are sent"
        weights = load_file(old / "model.safetensors")
        await cut.updates.begin()
        for name in sorted(weights):
            await cut.updates.load(save({name: weights[name]}), "back")
        ended = await cut.updates.end(None)
        assert ended is not None
        assert ended.version == "back"
        assert await cut.answer() == expected[0]
        # Of the last layer alone, of which a first stage has nothing.
        await cut.updates.begin()
        await cut.updates.load(save({OF_THE_LAST: 9.0 * weights[OF_THE_LAST]}), "last")
        ended = await cut.updates.end(None)
        assert ended is not None
        assert ended.version == "last"
        assert await cut.answer() != expected[0]


class _Alone:
    """A group of one process."""

    size, rank = 1, 0

    def maximum(self, flags: torch.Tensor) -> torch.Tensor:
        return flags


class _HalfApplied:
    """Gathered weights that cannot be put in place after all."""

    def check_ready(self) -> None:
        """All is there."""

    def apply(self) -> None:
        raise OSError("the device is gone")


def test_a_process_whose_weights_are_half_replaced_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error leaves the follower's loop, which ends the process, and the target with it."""
    decoder = tiny_decoder(tmp_path)
    stager = WeightStager(decoder, tmp_path, ModelOptions())
    monkeypatch.setattr(stager, "stage", _HalfApplied())
    follower = FollowingStager(stager, _Alone(), decoder.device)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="the device is gone"):
        follower.take(RankCall("apply"))
