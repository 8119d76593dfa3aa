"""What a target asks of the draft that it hosts, and what it refuses at start, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft.settings_problems import DEMO_TARGET
from services.embedded import build_embedded_draft
from services.embedded_settings import draft_needs
from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from services.target.settings import NO_DRAFT, DeviceRoundsChoice
from services.target.verifier import VerificationMode
from shared.errors import SettingsError
from shared.models.config import ModelConfig
from tests.helpers.mtp_heads import TinyMtp, write_mtp

DEMO = DEMO_TARGET.parent
REJECTION, BLOCK = "--speculative-use-rejection-sampling", "--speculative-use-block-verification"
EMBEDDED = ("--draft", "embedded")


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ((), VerificationMode.COUPLED),
        (("--verification-mode", "point-mass"), VerificationMode.POINT_MASS),
        ((REJECTION,), VerificationMode.REJECTION),
        ((BLOCK,), VerificationMode.BLOCK),
        ((REJECTION, BLOCK), VerificationMode.BLOCK),
    ],
)
def test_flags_name_one_rule(flags: tuple[str, ...], mode: VerificationMode) -> None:
    settings, _ = read_settings([*EMBEDDED, *flags], {})
    assert settings.verification is mode


@pytest.mark.parametrize("flag", [REJECTION, BLOCK])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "{flag} needs --draft embedded"),
        (
            (*EMBEDDED, "--verification-mode", "point-mass"),
            "{flag} and --verification-mode point-mass name two rules",
        ),
        ((*EMBEDDED, "--device-rounds", "on"), "--device-rounds on: .*{flag} needs auto or off"),
        (
            (*EMBEDDED, "--speculative-accept-threshold-acc", "0.5"),
            "the (rejection|block) rule has no thresholds",
        ),
        ((*EMBEDDED, "--speculative-algorithm", "NGRAM"), "{flag} .*; NGRAM repeats tokens"),
        ((*EMBEDDED, "--speculative-algorithm", "DFLASH"), "{flag} .*; DFLASH scores a block"),
        (
            (
                *EMBEDDED,
                *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2"),
                *("--speculative-num-draft-tokens", "6"),
            ),
            "--speculative-eagle-topk is 2; {flag} needs chains",
        ),
        (
            (*EMBEDDED, "--speculative-outcome-budget", "4"),
            "--speculative-outcome-budget is 4; {flag} needs 0",
        ),
    ],
)
def test_what_would_not_be_exact_is_refused(
    flag: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message.format(flag=flag)):
        read_settings([*flags, flag], {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*EMBEDDED, "--verification-mode", "point-mass"), "needs --verification-mode coupled"),
        ((*EMBEDDED, "--speculative-algorithm", "NGRAM"), "--speculative-algorithm is NGRAM"),
        ((*EMBEDDED, "--disable-cuda-graph"), "CUDA graphs; leave --disable-cuda-graph out"),
        (
            (*EMBEDDED, "--speculative-algorithm", "EAGLE3", "--page-size", "512"),
            "--page-size is 512, the draft's 16",
        ),
    ],
)
def test_rounds_that_cannot_be_are_refused_where_they_are_asked_for(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings([*flags, "--device-rounds", "on"], {})
    settings, _ = read_settings([*flags, "--device-rounds", "auto"], {})
    assert settings.device_rounds is DeviceRoundsChoice.AUTO


@pytest.mark.parametrize(
    ("flags", "on_gpu", "on_cpu"),
    [
        ((), True, False),
        (("--disable-cuda-graph",), False, False),
        (("--device-rounds", "off"), False, False),
        (("--device-rounds", "on"), True, True),
        (
            (
                *(*EMBEDDED, "--speculative-algorithm", "EAGLE3"),
                *("--device-rounds", "on", "--tp-size", "2"),
            ),
            True,
            True,
        ),
    ],
)
def test_rounds_stay_on_the_device_where_they_can(
    flags: tuple[str, ...], on_gpu: bool, on_cpu: bool
) -> None:
    settings, _ = read_settings(flags, {})
    assert settings.has_device_rounds(is_cuda=True) is on_gpu
    assert settings.has_device_rounds(is_cuda=False) is on_cpu


@pytest.mark.parametrize(
    ("page_size", "variable", "expected"),
    [("32", None, 32), ("32", "", 32), ("32", "8", 8), ("1024", None, 16)],
)
def test_a_hosted_draft_has_pages_of_the_targets_size(
    page_size: str, variable: str | None, expected: int
) -> None:
    env = {} if variable is None else {"OUTRIDER_DRAFT_PAGE_SIZE": variable}
    _, draft = read_settings([*EMBEDDED, "--page-size", page_size], env)
    assert draft is not None
    assert draft.page_size == expected


def test_a_hosted_draft_cannot_be_cut() -> None:
    with pytest.raises(SettingsError, match="OUTRIDER_DRAFT_TP_SIZE is 2; a draft that a target"):
        read_settings(EMBEDDED, {"OUTRIDER_DRAFT_TP_SIZE": "2"})
    settings, draft_settings = read_settings([*EMBEDDED, "--tp-size", "2"], {})
    assert draft_settings is not None
    assert (settings.tp_size, draft_settings.tp_size) == (2, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((BLOCK,), f"{BLOCK} needs a head of one layer"),
        (
            (
                *("--device-rounds", "on", "--speculative-num-steps", "3"),
                *("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"),
            ),
            "--device-rounds on needs --speculative-eagle-topk 1 of a head of several .* is 2",
        ),
    ],
)
def test_a_head_of_several_layers_is_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    folder = write_mtp(tmp_path, TinyMtp(num_layers=2))
    arguments = [
        *(*EMBEDDED, "--model-path", str(folder), "--device", "cpu", "--port", "0"),
        *("--max-total-tokens", "1024", "--speculative-algorithm", "MTP"),
        *("--speculative-draft-model-path", str(folder), *flags),
    ]
    settings, draft_settings = read_settings(arguments, {})
    assert draft_settings is not None
    engine = build_engine(settings, lambda report: None)
    with pytest.raises(SettingsError, match=message):
        build_embedded_draft(engine, settings, draft_settings)


@pytest.mark.parametrize("is_cache", [False, True], ids=["weights", "cache"])
def test_a_draft_without_room_names_the_targets_setting(
    is_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--device", "cpu", "--port", "0", "--max-total-tokens", "4096")
    settings, draft_settings = read_settings(
        [*EMBEDDED, *flags, "--speculative-algorithm", "EAGLE3"], {}
    )
    assert draft_settings is not None
    engine = build_engine(settings, lambda report: None)
    if is_cache:
        monkeypatch.setattr("shared.runtime.memory.free_memory_bytes", lambda device: 2**20)
    else:
        monkeypatch.setattr("services.draft.drafters.model_factory.load_head", _run_out)
    with pytest.raises(SettingsError) as raised:
        build_embedded_draft(engine, settings, draft_settings)
    message = raised.value.message
    assert message.startswith("the draft does not fit beside its target: ")
    assert "lower --max-total-tokens from 4,096 to " in message


def _run_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 1.00 MiB. GPU 0 has")


@pytest.mark.parametrize(
    ("flags", "shown", "limit"),
    [
        ((), "8 with 3,1,4", None),
        (
            ("--cuda-graph-max-bs", "4"),
            "4 with 3,1,4",
            "4 of 8 running requests have a lane at most",
        ),
    ],
)
def test_start_says_how_many_lanes_there_are(
    flags: tuple[str, ...], shown: str, limit: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [
        *(*EMBEDDED, "--device", "cpu", "--port", "0", "--max-total-tokens", "4096"),
        *("--speculative-algorithm", "EAGLE3", "--device-rounds", "on"),
        *("--max-running-requests", "8", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", *flags),
    ]
    settings, draft_settings = read_settings(arguments, {})
    assert draft_settings is not None
    caplog.set_level("INFO")
    engine = build_engine(settings, lambda report: None)
    draft = build_embedded_draft(engine, settings, draft_settings)
    draft.port.stop()
    assert f"(steps,topk,rows): {shown}" in caplog.text
    assert ("have a lane at most" in caplog.text) == (limit is not None)
    assert limit is None or limit in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "folder", "num_tables"),
    [("STANDALONE", "draft", 0), ("EAGLE3", "heads/eagle3", 1), ("EAGLE", "heads/eagle", 2)],
)
def test_the_target_leaves_room_for_the_weights_of_its_draft(
    algorithm: str, folder: str, num_tables: int
) -> None:
    size_bytes = (DEMO / folder / "model.safetensors").stat().st_size
    target = ModelConfig.from_folder(DEMO_TARGET)
    table_bytes = 2 * target.vocab_size * target.hidden_size
    for flags, num_own in (((), 0), (("--tp-size", "2"), num_tables)):
        read = read_settings([*EMBEDDED, "--speculative-algorithm", algorithm, *flags], {})
        assert draft_needs(*read).weight_bytes == size_bytes + num_own * table_bytes


def test_next_token_layers_take_as_much_as_another_layer() -> None:
    moe = DEMO / "demo-moe"
    read = read_settings(
        [*EMBEDDED, "--model-path", str(moe), "--speculative-algorithm", "MTP"], {}
    )
    size_bytes = (moe / "model.safetensors").stat().st_size
    num_layers = ModelConfig.from_folder(moe).num_layers
    assert draft_needs(*read).weight_bytes == size_bytes // num_layers


def test_other_drafts_and_none_take_nothing() -> None:
    assert draft_needs(*read_settings([], {})) == NO_DRAFT
    read = read_settings([*EMBEDDED, "--speculative-algorithm", "NGRAM"], {})
    assert draft_needs(*read).weight_bytes == 0
