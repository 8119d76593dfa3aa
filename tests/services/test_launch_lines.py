"""The launch lines of SGLang's documents, unchanged, with tiny models under the same names."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.check import check
from services.serve_plan import Plan, make_plan
from services.serve_settings import Placement
from shared.tokens import TreeShape
from tests.helpers.stand_ins import write_stand_ins

_FILE = Path(__file__).with_name("launch_lines.txt")
_LAUNCHER = ("python3", "-m", "sglang.launch_server")
LINES = tuple(line for line in _FILE.read_text().splitlines() if not line.startswith("#"))


@dataclass(frozen=True)
class Started:
    """What a line starts: the drafter, its tree and notices; in the order of the file."""

    algorithm: str
    shape: TreeShape
    notices: tuple[str, ...] = ()


_COMPILE = "--enable-torch-compile: no effect: forwards are fused kernels"
_COMPILE_MOST = "--torch-compile-max-bs: no effect"
STARTED = (
    Started("EAGLE", TreeShape(3, 4, 16)),
    Started("EAGLE", TreeShape(3, 4, 16), (_COMPILE, _COMPILE_MOST)),
    Started("EAGLE", TreeShape(3, 4, 16)),
    Started("EAGLE3", TreeShape(3, 4, 16)),
    Started("EAGLE (MTP)", TreeShape(1, 1, 2), ("--trust-remote-code: no effect",)),
    Started("DFLASH", TreeShape(4, 1, 5)),
    Started("STANDALONE", TreeShape(4, 2, 7)),
    Started("STANDALONE", TreeShape(4, 1, 5), ("SGLANG_ENABLE_SPEC_V2: no effect",)),
    Started("NGRAM", TreeShape(17, 10, 16)),
    Started("EAGLE", TreeShape(3, 1, 4)),
    Started("EAGLE", TreeShape(3, 4, 16)),
    Started("EAGLE", TreeShape(5, 8, 64), (_COMPILE,)),
    Started("EAGLE", TreeShape(5, 8, 64)),
    Started("EAGLE", TreeShape(3, 4, 16)),
    Started("EAGLE", TreeShape(5, 8, 64), (_COMPILE, _COMPILE_MOST)),
    Started("EAGLE", TreeShape(5, 8, 64)),
    Started("EAGLE3", TreeShape(5, 8, 32)),
    Started("EAGLE (MTP)", TreeShape(1, 1, 2), ("--trust-remote-code: no effect",)),
    Started(
        "EAGLE",
        TreeShape(3, 1, 4),
        ("--cuda-graph-bs: the largest is", "--attention-backend fa3: this backend is not here"),
    ),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cache, scratch = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("models")
    write_stand_ins(cache, scratch)
    return cache, scratch


@pytest.fixture(autouse=True)
def _offline(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, scratch = models
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(scratch)


def plan_of(line: str, *more: str, num_gpus: int = 0) -> Plan:
    """Returns the plan of a line; what stands before the flags names SGLang and its variables."""
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words if word.startswith("SGLANG_"))
    flags = [word for word in words if word not in _LAUNCHER and not word.startswith("SGLANG_")]
    return make_plan([*flags, *more], env, num_gpus)


def test_every_line_has_an_expectation() -> None:
    assert len(STARTED) == len(LINES)


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_of_sglang_starts_what_it_says(number: int) -> None:
    line, expected = LINES[number], STARTED[number]
    plan = plan_of(line)
    [draft] = plan.drafts
    assert (draft.algorithm, draft.settings.shape) == (expected.algorithm, expected.shape)
    assert len(plan.notices) == len(expected.notices)
    for notice, beginning in zip(plan.notices, expected.notices, strict=True):
        assert notice.startswith(beginning)
    words = line.split()
    for flag, names in (("--mem-fraction-static", 1), ("--mem-fraction", 1)):
        if flag in words:
            assert plan.target.mem_fraction_static == float(words[words.index(flag) + names])
    for setting in ("cuda_graph_max_bs", "max_running_requests"):
        flag = f"--{setting.replace('_', '-')}"
        if flag in words:
            assert getattr(plan.target, setting) == int(words[words.index(flag) + 1])
    assert (plan.gateway.host == "0.0.0.0") == ("0.0.0.0" in words)
    report = check(plan)
    assert expected.algorithm in report
    assert "would say: ready: http://127.0.0.1:8000/v1" in report


@pytest.mark.parametrize("number", range(len(LINES)))
def test_on_one_gpu_the_target_hosts_the_draft_of_a_line(number: int) -> None:
    """As far as a machine without a GPU can tell: the flags fit together in one process."""
    plan = plan_of(LINES[number], num_gpus=1)
    assert plan.placement is Placement.EMBEDDED
    [draft] = plan.drafts
    assert draft.settings.shape == STARTED[number].shape
    assert "--draft=embedded" in plan.target_arguments
    assert not plan.remote_drafts


def test_with_a_gpu_to_spare_the_draft_has_it_to_itself() -> None:
    plan = plan_of(LINES[3], "--placement", "remote", num_gpus=2)
    assert plan.drafts[0].settings.device == "cuda:1"
    split = plan_of(LINES[3], "--placement", "remote", "--tp", "2", num_gpus=3)
    assert split.drafts[0].settings.device == "cuda:2"


def test_a_head_stays_with_the_target_unless_flags_say_otherwise() -> None:
    assert plan_of(LINES[3], num_gpus=2).placement is Placement.EMBEDDED
    assert plan_of(LINES[3], num_gpus=0).placement is Placement.REMOTE
    for flags in (("--draft-device", "cuda:1"), ("--speculative-outcome-budget", "8")):
        assert plan_of(LINES[3], *flags, num_gpus=2).placement is Placement.REMOTE


def test_the_lists_of_a_line_reach_the_target() -> None:
    plan = plan_of(LINES[-1])
    assert plan.target.cuda_graph_max_bs == 160
    assert plan.target.max_running_requests == plan.drafts[0].settings.max_running_requests == 128


def test_names_of_the_hub_are_the_names_clients_see() -> None:
    plan = plan_of(LINES[0])
    assert plan.target.model_id == "meta-llama/Llama-2-7b-chat-hf"
    assert plan.gateway.tokenizer == plan.target.model_path
