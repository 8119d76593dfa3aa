"""A draft inside the target's process: the same output as without, or as with a remote one."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft.events import CandidatesReady, SequencesReleased
from services.embedded import build_embedded_draft
from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from shared.candidate_columns import CandidateColumns
from shared.errors import CheckpointError, SettingsError
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.other_vocabularies import renumbered
from tests.helpers.served import target_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=300), seed=3, with_tokenizer=True)
    return folder


def _arguments(folder: Path, *flags: str) -> list[str]:
    return [
        *("--model-path", str(folder), "--port", "0", "--device", "cpu"),
        *("--max-total-tokens", "2048", "--context-length", "256", "--draft", "embedded"),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000"),
        # Whether speculation pays for a tiny model depends on what else the machine does.
        "--speculative-adaptive=false",
        *flags,
    ]


def _process(folder: Path, *flags: str) -> TargetProcess:
    return target_process(_arguments(folder, *flags))


def _request(
    temperature: float, *, disabled: bool, num_draft_tokens: int | None = None
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=[1, 2, 3, 4, 5],
        sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=3),
        stop_params=sampling_pb2.StopParams(max_output_token_count=36, ignore_eos=True),
        speculation_params=pb.SpeculationParams(
            disabled=disabled, draft_token_count=num_draft_tokens
        ),
    )


@pytest.mark.parametrize("budget", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_output_is_the_same_and_drafted(
    folder: Path, temperature: float, budget: int
) -> None:
    process = _process(
        folder,
        *("--speculative-draft-model-path", str(folder)),
        *("--speculative-outcome-budget", str(budget)),
    )
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        stub = pb_grpc.TargetServiceStub(channel)
        outputs: list[list[int]] = []
        for disabled in (True, False):
            call = stub.Generate(_request(temperature, disabled=disabled))
            responses = [response async for response in call]
            outputs.append([token for each in responses for token in each.delta.token_ids])
        assert outputs[0] == outputs[1]
        assert responses[-1].finished.speculation.accepted_token_count > 0
        call = stub.Generate(_request(temperature, disabled=False, num_draft_tokens=2))
        responses = [response async for response in call]
        assert [token for each in responses for token in each.delta.token_ids] == outputs[0]
        stats = responses[-1].finished.speculation
        assert stats.drafted_token_count == stats.verified_round_count > 0
        info = await admin_service_pb2_grpc.AdminServiceStub(admin).GetServerInfo(
            admin_service_pb2.GetServerInfoRequest()
        )
        assert info.settings["draft"] == "embedded"
        assert info.settings["speculative-algorithm"] == "STANDALONE"
    await process.stop(grace_s=0.0)


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--speculative-use-rejection-sampling", "rejection"),
        ("--speculative-use-block-verification", "block"),
    ],
)
async def test_drawn_chains_are_verified(folder: Path, flag: str, rule: str) -> None:
    """With temperature 0 the output is plain decoding's all the same."""
    process = _process(folder, "--speculative-draft-model-path", str(folder), flag)
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        stub = pb_grpc.TargetServiceStub(channel)
        outputs: list[list[int]] = []
        for temperature, disabled in ((0.0, True), (0.0, False), (1.0, False)):
            call = stub.Generate(_request(temperature, disabled=disabled))
            responses = [response async for response in call]
            outputs.append([token for each in responses for token in each.delta.token_ids])
            accepted = responses[-1].finished.speculation.accepted_token_count
            assert (accepted == 0) == disabled
        assert outputs[0] == outputs[1] != outputs[2]
        assert len(outputs[2]) == 36
        info = await admin_service_pb2_grpc.AdminServiceStub(admin).GetServerInfo(
            admin_service_pb2.GetServerInfoRequest()
        )
        assert info.settings[flag.removeprefix("--")] == "true"
        assert info.settings["verification-mode"] == rule
    await process.stop(grace_s=0.0)


def test_a_tokenizer_with_few_tokens_in_common_is_refused_at_start(
    folder: Path, tmp_path: Path
) -> None:
    draft = renumbered(folder, tmp_path / "draft", range(40, 52))
    with pytest.raises(CheckpointError, match="12 of the target's 258 tokens") as refused:
        _process(folder, "--speculative-draft-model-path", str(draft))
    assert str(draft) in refused.value.message
    assert str(folder) in refused.value.message


def test_target_that_has_stopped_does_not_break_its_draft(folder: Path) -> None:
    settings, draft_settings = read_settings(_arguments(folder), {})
    assert draft_settings is not None
    engine = build_engine(settings, lambda report: None)
    draft = build_embedded_draft(engine, settings, draft_settings)
    engine.stop()
    for output in (CandidatesReady(1, CandidateColumns()), SequencesReleased(1, (1,))):
        draft.port._deliver(output)
    draft.port.stop()


def test_flag_that_neither_knows_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="unknown flag --speculative-num-stips"):
        read_settings(_arguments(folder, "--speculative-num-stips", "3"), {})


def test_flag_of_the_draft_is_refused_without_one(folder: Path) -> None:
    with pytest.raises(SettingsError, match="unknown flag --speculative-num-steps"):
        read_settings(["--model-path", str(folder), "--speculative-num-steps", "3"], {})
