"""Hidden-state drafts with a real target, in both placements: features flow, output stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from services.draft.settings import DraftSettings
from services.embedded import build_embedded_draft
from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.runtime.ring_memory import FeatureRingWriter
from shared.runtime.round_runner import RoundRunner
from shared.runtime.selection_runner import SelectionRunner
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.mtp_heads import TinyMtp, write_mtp
from tests.helpers.served import running_draft, running_target

VOCAB_SIZE = 300
AHEAD = ", ahead"
PROMPTS = (list(range(1, 40)), list(range(1, 30)), [7, 7, 7])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=6)
    target = write_mtp(tmp_path_factory.mktemp("target"), TinyMtp(num_layers=2, shape=shape))
    folders = {"target": write_byte_tokenizer(target)}
    for kind in ("EAGLE", "EAGLE3"):
        head = TinyHead(
            kind=kind,
            vocab_size=VOCAB_SIZE,
            hidden_size=shape.hidden_size,
            target_hidden_size=shape.hidden_size,
        )
        folders[kind] = write_head(tmp_path_factory.mktemp("head") / kind, head)
    block_head = TinyDflash(vocab_size=VOCAB_SIZE)
    folders["DFLASH"] = write_dflash(tmp_path_factory.mktemp("head") / "DFLASH", block_head)
    return folders


def _flags(folders: dict[str, Path], kind: str, *, is_pinned: bool = True) -> list[str]:
    algorithm = kind.removesuffix(AHEAD)
    # Next-token layers are the target's own.
    has_own = algorithm in folders
    own = ("--speculative-draft-model-path", str(folders[algorithm])) if has_own else ()
    ahead = ("--speculative-outcome-budget", "4") if kind.endswith(AHEAD) else ()
    shape = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2")
    pinned = (*shape, "--speculative-num-draft-tokens", "6") if is_pinned else ()
    return ["--speculative-algorithm", algorithm, *own, *ahead, *pinned]


@asynccontextmanager
async def _serving(
    folders: dict[str, Path], kind: str, placement: str, *flags: str, is_pinned: bool = True
) -> AsyncIterator[pb_grpc.TargetServiceStub]:
    folder = folders["target"]
    arguments = [
        *("--model-path", str(folder), "--port", "0", "--device", "cpu"),
        *("--max-total-tokens", "2048", "--context-length", "256"),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000", "--draft", placement),
    ]
    if placement == "embedded":
        arguments += _flags(folders, kind, is_pinned=is_pinned)
    arguments += flags
    async with running_target(arguments) as target:
        if placement == "embedded":
            yield target.stub
        else:
            async with _remote(folders, kind, target.process.port):
                yield target.stub


@asynccontextmanager
async def _remote(folders: dict[str, Path], kind: str, port: int) -> AsyncIterator[None]:
    settings = load_settings(
        DraftSettings,
        service="draft",
        arguments=[
            *("--port", "0", "--target", f"127.0.0.1:{port}", "--device", "cpu"),
            *("--max-total-tokens", "2048", "--target-model-path", str(folders["target"])),
            *_flags(folders, kind),
        ],
        env={},
    )
    async with running_draft(settings):
        yield


async def _outputs(
    stub: pb_grpc.TargetServiceStub, temperature: float, *, disabled: bool
) -> tuple[list[list[int]], int]:
    """Returns each prompt's output, and how many trees were verified in all."""

    async def one(prompt: list[int]) -> tuple[list[int], int]:
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=3),
            stop_params=sampling_pb2.StopParams(max_output_token_count=16, ignore_eos=True),
            speculation_params=pb.SpeculationParams(disabled=disabled),
        )
        responses = [response async for response in stub.Generate(request)]
        tokens = [token for each in responses for token in each.delta.token_ids]
        return tokens, responses[-1].finished.speculation.verified_round_count

    results = await asyncio.gather(*map(one, PROMPTS))
    return [tokens for tokens, _ in results], sum(count for _, count in results)


async def _assert_nothing_changes(stub: pb_grpc.TargetServiceStub) -> None:
    """With drafts and without, greedily and drawn; trees are verified each time."""
    for temperature in (0.0, 1.0):
        # The prompts come from the prefix cache, the second time from the draft's as well.
        expected, _ = await _outputs(stub, temperature, disabled=True)
        found, num_verified = await _outputs(stub, temperature, disabled=False)
        assert found == expected
        assert num_verified > 0


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        # Each kind in both placements and both ways, of the four pairs of those two.
        *(("EAGLE", "remote"), (f"EAGLE{AHEAD}", "embedded")),
        *(("EAGLE3", "embedded"), (f"EAGLE3{AHEAD}", "remote")),
        *(("MTP", "remote"), (f"MTP{AHEAD}", "embedded")),
        *(("DFLASH", "embedded"), (f"DFLASH{AHEAD}", "remote")),
    ],
)
async def test_head_drafts_and_changes_nothing(
    folders: dict[str, Path], kind: str, placement: str
) -> None:
    async with _serving(folders, kind, placement) as stub:
        await _assert_nothing_changes(stub)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
async def test_rounds_on_the_device_change_nothing(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, launched = RoundRunner.launch, []

    def counted(runner: RoundRunner, masked: Iterable[int]) -> None:
        launched.append(len(runner.sequence_ids))
        launch(runner, masked)

    monkeypatch.setattr(RoundRunner, "launch", counted)
    async with _serving(folders, kind, "embedded", "--device-rounds", "on") as stub:
        await _assert_nothing_changes(stub)
    assert max(launched) == len(PROMPTS)


@pytest.mark.parametrize("kind", [f"EAGLE3{AHEAD}", f"DFLASH{AHEAD}"])
async def test_trees_of_remote_heads_are_selected_on_the_device(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, launched = SelectionRunner.launch, []

    def counted(runner: SelectionRunner, masked: Iterable[int]) -> None:
        launched.append(len(runner.sequence_ids))
        launch(runner, masked)

    monkeypatch.setattr(SelectionRunner, "launch", counted)
    async with _serving(folders, kind, "remote", "--device-rounds", "on") as stub:
        await _assert_nothing_changes(stub)
    assert launched


@pytest.mark.parametrize(
    ("kind", "placement", "flags"),
    [
        ("EAGLE3", "embedded", ("--device-rounds", "on")),
        ("EAGLE3", "remote", ("--tp-size", "2")),
        ("MTP", "embedded", ()),
        ("NGRAM", "embedded", ()),
    ],
)
async def test_a_target_in_stages_writes_what_it_writes_whole(
    folders: dict[str, Path], kind: str, placement: str, flags: tuple[str, ...]
) -> None:
    """Prompts are longer than a chunk, and come from the prefix cache from the second time on."""
    small = ("--page-size", "4", "--chunked-prefill-size", "16")
    async with _serving(folders, kind, placement, *small) as stub:
        expected = [await _outputs(stub, each, disabled=True) for each in (0.0, 1.0)]
    async with _serving(folders, kind, placement, *small, *flags, "--pp-size", "2") as stub:
        for _ in range(2):
            assert expected == [await _outputs(stub, each, disabled=True) for each in (0.0, 1.0)]
        await _assert_nothing_changes(stub)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_draft_lends_its_pages_only_to_rounds_that_are_wanted(
    folders: dict[str, Path], choice: str
) -> None:
    arguments = [
        *("--model-path", str(folders["target"]), "--device", "cpu", "--draft", "embedded"),
        *("--max-total-tokens", "2048", "--context-length", "256", "--device-rounds", choice),
        *_flags(folders, "EAGLE3"),
    ]
    settings, draft_settings = read_settings(arguments, {})
    assert draft_settings is not None
    engine = build_engine(settings, lambda report: None)
    port = build_embedded_draft(engine, settings, draft_settings).port
    port.stop()
    assert (port._rounds is not None) is (choice == "on")


async def test_rounds_that_are_chosen_change_nothing(folders: dict[str, Path]) -> None:
    """Plain steps, the draft's own tree or chains, as the machine happens to measure them."""
    flags = ("--device-rounds", "on", "--speculative-adaptive")
    async with _serving(folders, "EAGLE3", "embedded", *flags, is_pinned=False) as stub:
        for temperature in (0.0, 1.0):
            expected, _ = await _outputs(stub, temperature, disabled=True)
            for _ in range(2):
                found, _ = await _outputs(stub, temperature, disabled=False)
                assert found == expected


@pytest.mark.parametrize("quantisation", ["int8", "fp8"])
async def test_a_draft_in_8_bits_changes_nothing(
    folders: dict[str, Path], quantisation: str
) -> None:
    flags = ("--speculative-draft-model-quantization", quantisation)
    async with _serving(folders, "EAGLE3", "embedded", *flags) as stub:
        for temperature in (0.0, 1.0):
            expected, _ = await _outputs(stub, temperature, disabled=True)
            found, num_verified = await _outputs(stub, temperature, disabled=False)
            assert found == expected
            assert num_verified > 0


@pytest.mark.parametrize("num_rows", [0, 4, 4096])
async def test_features_travel_through_memory_while_it_has_room(
    folders: dict[str, Path], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, starts = FeatureRingWriter.write, []

    def written(ring: FeatureRingWriter, rows: torch.Tensor) -> int | None:
        starts.append(write(ring, rows))
        return starts[-1]

    monkeypatch.setattr(FeatureRingWriter, "write", written)
    flags = ("--feature-ring-rows", str(num_rows))
    async with _serving(folders, "EAGLE3", "remote", *flags) as stub:
        expected, _ = await _outputs(stub, 0.0, disabled=True)
        found, num_verified = await _outputs(stub, 0.0, disabled=False)
        assert found == expected
        assert num_verified > 0
    in_ring = [start for start in starts if start is not None]
    assert bool(in_ring) == (num_rows > 0)
    assert in_ring == sorted(in_ring)
    # No prompt fits the small ring, however soon its draft reads; committed rows do.
    assert (None in starts) == (num_rows == 4)
