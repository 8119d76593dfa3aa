"""Flags, ports and messages of the launcher."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.output.style import (
    REASONING_SYNONYMS,
    TOOL_SYNONYMS,
    ReasoningParser,
    ToolCallParser,
)
from services import serve
from services.check import check
from services.ranks import Ranks
from services.serve import ready_line
from services.serve_line import all_fields, split_line
from services.serve_plan import Plan, make_plan, num_gpus
from services.serve_settings import Placement
from services.stack import Child, ChildSpec, Part
from services.target.settings import TargetSettings
from shared.errors import CheckpointError, SettingsError
from shared.models.config import ModelConfig
from shared.runtime.memory import in_words
from shared.settings import load_settings
from shared.tokens import TreeShape
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer, write_checkpoint
from tests.helpers.other_vocabularies import renumber_tokenizer
from tests.helpers.serving import EVERY_ROUND_HAS_A_TREE, free_ports

ROOT = Path(__file__).parents[2]


def _model_folder(path: Path, *, family: str = "Llama", text: str = "") -> Path:
    path.mkdir()
    (path / "config.json").write_text(f'{{"architectures": ["{family}ForCausalLM"]{text}}}')
    return write_byte_tokenizer(path)


def _outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _plan(*arguments: str, gpus: int = 0, env: Mapping[str, str] | None = None) -> Plan:
    return make_plan(arguments, env or {}, gpus)


def _problems(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as refused:
        _plan(*arguments, env=env)
    return refused.value.message


def _algorithms(plan: Plan) -> tuple[str, ...]:
    return tuple(each.algorithm for each in plan.drafts)


def test_the_demo_model_is_served_with_the_demo_draft() -> None:
    plan = _plan()
    assert _algorithms(plan) == ("STANDALONE",)
    assert tuple(port for port, _ in plan.ports) == (8000, 8001, 50051, 50052, 50061, 50062)
    assert plan.target.model_id == "demo"


@pytest.mark.parametrize(
    "words",
    [
        "--served-model-name first second third",
        "--served-model-name first,second --model-alias third",
        "--target-served-model-name first second --model-alias third",
        "--config FILE",
    ],
)
def test_names_of_a_model_after_the_first_are_aliases(words: str, tmp_path: Path) -> None:
    file = tmp_path / "names.yaml"
    file.write_text("served-model-name: [first, second, third]\n")
    plan = _plan(*words.replace("FILE", str(file)).split())
    assert plan.target.served_model_name == "first"
    assert plan.target_arguments.count("--served-model-name=first") == 1
    assert plan.gateway.model_alias == ("second", "third")
    assert "model: first" in ready_line(plan)


def test_one_name_of_a_model_has_no_aliases() -> None:
    plan = _plan("--served-model-name", "only")
    assert (plan.target.served_model_name, plan.gateway.model_alias) == ("only", ())
    assert "--served-model-name needs a value" in _problems("--served-model-name")


def test_another_model_drafts_from_its_own_text_unless_told_otherwise(tmp_path: Path) -> None:
    model, draft = _model_folder(tmp_path / "model"), _model_folder(tmp_path / "draft")
    flags = ("--model", str(model))
    assert _algorithms(_plan(*flags)) == ("NGRAM",)
    assert _algorithms(_plan(*flags, "--draft-model", str(draft))) == ("STANDALONE",)
    named = _plan(*flags, "--draft-model", str(draft), "--algorithm", "eagle3")
    assert _algorithms(named) == ("EAGLE3",)
    assert f"--tokenizer={model}" in named.gateway_arguments


@pytest.mark.parametrize("flags", [("--placement", "embedded"), ("--algorithm", "NONE")])
def test_no_draft_process_means_no_draft_ports(flags: tuple[str, ...]) -> None:
    plan = _plan(*flags)
    assert not plan.remote_drafts
    assert tuple(port for port, _ in plan.ports) == (8000, 8001, 50051, 50052)


@pytest.mark.parametrize(("placement", "port"), [("remote", 50062), ("embedded", 50052)])
def test_a_learner_teaches_the_draft_that_there_is(placement: str, port: int) -> None:
    flags = ("--algorithm", "EAGLE3", "--placement", placement)
    assert not _plan(*flags).learner_arguments
    words = _plan(*flags, "--speculative-online-training").learner_arguments
    assert "--target=127.0.0.1:50051" in words
    assert f"--publish-to=127.0.0.1:{port}" in words
    assert "--speculative-algorithm=EAGLE3" in words


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE", "EAGLE EAGLE3"])
def test_a_learner_without_a_head_to_teach_is_refused(algorithm: str) -> None:
    flags = ("--algorithm", *algorithm.split(), "--speculative-online-training")
    assert "--speculative-online-training: one draft" in _problems(*flags)


@pytest.mark.parametrize("names", ["standalone, NGRAM,ngram", "STANDALONE NGRAM"])
def test_several_algorithms_are_as_many_drafts(names: str) -> None:
    words = names.split() if "," not in names else [names]
    plan = _plan("--algorithm", *words)
    assert _algorithms(plan) == ("STANDALONE", "NGRAM")
    assert tuple(port for port, _ in plan.ports)[-4:] == (50061, 50062, 50063, 50064)
    assert [each.name for each in plan.drafts] == ["draft-standalone", "draft-ngram"]


def test_several_drafts_have_as_many_ports_of_metrics() -> None:
    env = {"OUTRIDER_TARGET_METRICS_PORT": "50053", "OUTRIDER_DRAFT_METRICS_PORT": "50063"}
    plan = _plan("--algorithm", "STANDALONE,NGRAM", env=env)
    assert [port for port, _ in plan.ports][-7:] == [
        *(50061, 50062, 50064, 50065),
        *(50053, 50063, 50066),
    ]
    assert "--metrics-port=50066" in plan.drafts[1].arguments
    problem = _problems("--draft-metrics-port", "50051")
    assert problem.startswith("ports wanted twice: 50051;")
    assert problem.endswith("set --target-port or --draft-metrics-port")


def test_a_busy_port_of_metrics_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        plan = _plan("--draft-metrics-port", str(port))
        [problem] = [line for line in serve._busy_ports(plan) if f"port {port} " in line]
    assert problem.endswith("stop it, or set --draft-metrics-port")


@pytest.mark.parametrize("flag", ["--placement=embedded", "--draft-model=MODEL"])
def test_what_only_one_draft_can_have_is_refused_for_several(flag: str, tmp_path: Path) -> None:
    flag = flag.replace("MODEL", str(_model_folder(tmp_path / "model")))
    assert "--speculative-algorithm names 2" in _problems("--algorithm", "NGRAM,STANDALONE", flag)


@pytest.mark.parametrize(
    ("algorithm", "is_head"), [("DFLASH", True), ("EAGLE", True), ("NGRAM", False)]
)
def test_a_head_in_a_process_of_its_own_is_told_its_target(
    algorithm: str, is_head: bool, tmp_path: Path
) -> None:
    model, head = _model_folder(tmp_path / "model"), _model_folder(tmp_path / "head")
    own = ("--draft-model", str(head)) if is_head else ()
    [draft] = _plan("--model", str(model), "--algorithm", algorithm, *own).drafts
    assert (f"--target-model-path={model}" in draft.arguments) == is_head
    [demo] = _plan("--algorithm", algorithm).drafts
    assert not any(word.startswith("--target-model-path") for word in demo.arguments)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--algorithm=NGRAM,FOO", "it must be one of STANDALONE, NGRAM,"),
        ("--algorithm=,", "--algorithm is ','; it must be one of"),
        (
            "--target-port=65536",
            "--target-port is '65536'; it must be a whole number in [0, 65535]",
        ),
        ("--port=0", "a launcher needs to know the port"),
        ("--gateway-port=50052", "ports wanted twice: 50052; each service takes two in a row"),
        ("--algorithm=NGRAM,STANDALONE --target-port=50064", "ports wanted twice: 50064"),
        ("--speculative-num-stips 3", "did you mean --speculative-num-steps?"),
        ("--dp-size 2", "--dp-size: replicas are targets of their own"),
        ("--enable-dp-attention", "--dp-size is 1 and --tp-size 1; they must be one number"),
        ("--enable-dp-attention --tp 4 --dp 2", "--dp-size is 2 and --tp-size 4; they must be"),
        ("--enable-dp-attention --dp 2", "--dp-size is 2 and --tp-size 1; they must be"),
        ("--node-rank 1", "--node-rank is 1; it must be below --nnodes, 1"),
        ("--tp 2 --nnodes 2", "--dist-init-addr is missing; --nnodes is 2"),
        ("--tp 2 --pp 2 --nnodes 3", "--nnodes is 3; it must divide the number of processes, 4"),
        ("--dist-init-addr host", "--dist-init-addr is 'host'; it must be HOST:PORT"),
        ("--dp 2", "--dp-size: replicas are targets of their own"),
        ("--metrics-port 1", "each service has its own: --target-metrics-port"),
        ("--target h:1", "the target is started here"),
        ("stray", "unexpected argument 'stray'"),
        ("--mem-fraction 2 --max-queued-requests 0", "--max-queued-requests is '0'"),
        ("--mem-fraction 2 --max-queued-requests 0", "--mem-fraction is '2'"),
        ("--certs nowhere", "--certs: nowhere has no ca.pem"),
        ("--chat-template chatml", "--chat-template: the template is chat_template.jinja in the"),
        ("--download-dir /models", "--download-dir: models are kept in the Hub's cache; the"),
        ("--base-gpu-id 4", "--base-gpu-id: name the first GPU by --device cuda:N"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: fp8_e4m3 takes as little memory"),
        ("--tool-call-parser step3", "'step3'; it must be one of auto, none, hermes, llama3, "),
        ("--load-format gguf", "--load-format is 'gguf'; it must be one of auto, safetensors, pt"),
        ("--max-model-len 99", "--max-model-len is vLLM's name; here it is --context-length"),
        ("--max-num-seqs 9", "--max-num-seqs is vLLM's name; here it is --max-running-requests"),
        ("--gpu-memory-utilization 0.9", "vLLM's name; here it is --mem-fraction-static, a share"),
        ("--enable-prefix-caching", "--enable-prefix-caching: prefixes are always shared"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(flags: str, problem: str) -> None:
    assert problem in _problems(*flags.split())


@pytest.mark.parametrize("flag", ["--enable-cash-report", "--no-such-flag", "--num-gpus"])
def test_only_misspelt_flags_are_answered_with_another(flag: str) -> None:
    [problem] = _problems(flag).splitlines()
    is_misspelt = flag == "--enable-cash-report"
    hint = "; did you mean --enable-cache-report?" if is_misspelt else ""
    assert problem == f"unknown flag {flag}{hint}"


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (
            "--port 99999 --target-page-size 0 --draft-page-size 9999",
            "--target-page-size, --draft-page-size, --port",
        ),
        ("--speculative-algorithm FOO --port 99999", "--speculative-algorithm, --port"),
        ("--port abc --max-running-requests 0 --foo 1", "foo, --max-running-requests, --port"),
        ("--tp 0 --model-alias=a --dtype int4 --log-level x", "--tp, --dtype, --log-level"),
        ("--certs nowhere --dp 2 --cors-origin x", "--certs, --dp-size, --cors-origin"),
    ],
)
def test_the_problems_of_all_services_are_reported_by_the_names_typed(
    line: str, flags: str
) -> None:
    problems = sorted(_problems(*line.split()).splitlines())
    assert len(problems) == len(flags.split(", "))
    for flag in flags.split(", "):
        assert sum(flag in problem.split(":")[0] for problem in problems) == 1


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server",
        "/usr/bin/python3.12 -m sglang.launch_server",
        "sglang serve",
        "vllm serve",
        "python3 -m vllm.entrypoints.openai.api_server",
    ],
)
def test_the_command_of_a_pasted_line_is_left_out(command: str) -> None:
    assert _plan(*command.split(), "--port", "9000").gateway.port == 9000
    model = _plan("vllm", "serve", "shared/demo/target", "--port=9000").target.model_path
    assert model == Path("shared/demo/target")
    words = ("SGLANG_ENABLE_SPEC_V2=1", *command.split(), "--port", "0")
    assert _problems(*words).startswith("unexpected argument 'SGLANG_ENABLE_SPEC_V2=1'")


def test_the_largest_graph_is_capped_with_a_note() -> None:
    plan = _plan("--cuda-graph-max-bs", "512")
    assert plan.target.cuda_graph_max_bs == 256
    [notice] = plan.notices
    assert notice.startswith("--cuda-graph-max-bs 512: 256 is taken, the most there can be")
    assert "--cuda-graph-max-bs is '0'" in _problems("--cuda-graph-max-bs", "0")


@pytest.mark.parametrize(
    ("flag", "name", "parser"),
    [
        ("tool-call-parser", "qwen25", "hermes"),
        ("tool-call-parser", "qwen3_coder", "qwen3-coder"),
        ("tool-call-parser", "deepseekv3", "deepseek"),
        ("tool-call-parser", "gpt-oss", "harmony"),
        ("tool-call-parser", "kimi_k2", "kimi-k2"),
        ("reasoning-parser", "gpt-oss", "harmony"),
        ("reasoning-parser", "deepseek-v3", "qwen3"),
        ("reasoning-parser", "glm45", "qwen3"),
    ],
)
def test_parsers_of_sglang_are_known(flag: str, name: str, parser: str) -> None:
    gateway = _plan(f"--{flag}", name).gateway
    assert getattr(gateway, flag.replace("-", "_")).value == parser


def test_every_synonym_of_a_parser_is_one_of_ours() -> None:
    assert set(TOOL_SYNONYMS.values()) <= {parser.value for parser in ToolCallParser}
    assert set(REASONING_SYNONYMS.values()) <= {parser.value for parser in ReasoningParser}


@pytest.mark.parametrize("flags", ["--ep 1 --dp-size 1", "--pp-size 1 --nnodes 1 --node-rank 0"])
def test_one_of_what_there_is_one_of_is_taken(flags: str) -> None:
    assert _plan(*flags.split()).target == _plan().target


@pytest.mark.parametrize("ep_size", [1, 4])
def test_attention_spreads_sequences_over_the_gpus_of_a_target(ep_size: int) -> None:
    line = "--tp 4 --dp 4 --enable-dp-attention" + (f" --ep {ep_size}" if ep_size > 1 else "")
    target = _plan(*line.split()).target
    assert (target.tp_size, target.dp_size, target.ep_size) == (4, 4, ep_size)
    assert target.enable_dp_attention


def test_a_host_that_is_not_the_first_becomes_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line of the first, and nothing beside it."""
    line = ("--tp", "4", "--nnodes", "2", "--nccl-init-addr", "first:5000", "--node-rank", "1")
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: called.append(words))
    monkeypatch.setattr(serve, "_serve", _nothing)
    assert serve.serve(_plan(*line)) == 0
    [[_, _, module, *words]] = called
    assert module == "services.target"
    target = load_settings(TargetSettings, service="target", arguments=words, env={})
    assert target.ranks == Ranks(4, 1, 2, 1, "first:5000")
    assert list(target.ranks.here) == [2, 3]


async def test_a_signal_says_how_long_a_stop_takes_and_a_second_one_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal"
    words = ("gateway", str(journal), "--stubborn")
    child = Child(ChildSpec("gateway", "tests.helpers.stand_in", words, tmp_path / "gateway.log"))

    async def has_started() -> bool:
        return journal.exists()

    monkeypatch.setattr(serve, "parts", lambda plan: (Part(child, has_started),))
    plan = _plan("--drain-grace-s", "20", "--log-dir", str(tmp_path))
    running = asyncio.create_task(serve._serve(plan))
    for event in ("gateway started", "gateway ignored SIGTERM"):
        while not journal.exists() or event not in journal.read_text():
            assert not running.done()
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert not child.is_running
    assert capsys.readouterr().err.splitlines() == [
        "serve: stopping; at most 20 s for requests to finish (Ctrl-C again stops at once)"
    ]


def test_the_grace_of_a_stop_is_the_shorter_of_two() -> None:
    assert serve.grace_s(_plan()) == 30
    assert serve.grace_s(_plan("--stop-grace-s", "5")) == 5


async def _nothing(plan: Plan) -> int:
    """What a process that became another does not come to."""
    return 0


def test_a_draft_with_another_tokenizer_is_refused_with_both_folders(tmp_path: Path) -> None:
    model = _model_folder(tmp_path / "model")
    problem = _problems("--draft-model", str(model), "--algorithm", "STANDALONE")
    assert "the tokenizers differ" in problem
    assert str(model) in problem
    assert "demo/target" in problem


@pytest.mark.parametrize("placement", ["remote", "embedded"])
def test_a_draft_of_another_family_is_told_its_targets_tokenizer(
    placement: str, tmp_path: Path
) -> None:
    model, draft = _model_folder(tmp_path / "model"), _model_folder(tmp_path / "draft")
    flags = ("--model", str(model), "--draft-model", str(draft), "--placement", placement)
    plan = _plan(*flags)
    assert plan.drafts[0].settings.tokenizer is None, "the same tokenizer"
    config = model / "config.json"
    config.write_text(config.read_text().replace("}", ', "vocab_size": 300}'))
    plan = _plan(*flags)
    assert plan.drafts[0].settings.tokenizer == model, "the same, and more ids"
    assert not plan.notices
    renumber_tokenizer(draft, draft, range(200, 0, -1))
    plan = _plan(*flags)
    [notice] = plan.notices
    assert notice.endswith("it drafts 200 of the target's 258 tokens (77.5%)")
    words = plan.drafts[0].arguments if placement == "remote" else plan.target_arguments
    assert f"--tokenizer={model}" in words
    problem = _problems(*flags, "--speculative-online-training")
    assert "another tokenizer than its target's cannot be taught" in problem


def test_standalone_needs_a_draft_model_for_another_model(tmp_path: Path) -> None:
    model = _model_folder(tmp_path / "model")
    problem = _problems("--model", str(model), "--algorithm", "STANDALONE")
    assert "STANDALONE needs a smaller model with the same tokenizer" in problem


def test_a_flag_of_two_services_can_be_set_for_one() -> None:
    plan = _plan("--dtype", "bf16", "--draft-dtype", "fp32", "--target-metrics-port", "9000")
    assert plan.target.dtype.value == "bfloat16"
    assert plan.drafts[0].settings.dtype.value == "float32"
    assert (plan.target.metrics_port, plan.drafts[0].settings.metrics_port) == (9000, None)


def test_a_hosted_draft_has_its_own_number_of_sequences() -> None:
    flags = ("--placement", "embedded", "--max-running-requests", "8")
    assert _plan(*flags).drafts[0].settings.max_running_requests == 8
    own = _plan(*flags, "--draft-max-running-requests", "4")
    assert (own.target.max_running_requests, own.drafts[0].settings.max_running_requests) == (8, 4)


def test_every_flag_of_every_service_can_be_said_to_serve() -> None:
    """By its own name or, where several services have it, by one that names the service."""
    refused = {
        (service, name)
        for service, fields in all_fields().items()
        for each in fields
        for name in (each.flag, *each.aliases)
        if split_line([name, "1"]).problems
        and split_line([f"--{service}{each.flag[1:]}", "1"]).problems
    }
    assert refused == set()


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        ("--model shared/demo/target", ""),
        ("--model-path shared/demo/target", ""),
        ("--mem-fraction 0.5", ""),
        ("--mem-fraction-static 0.5", ""),
        ("--trust-remote-code", "--trust-remote-code: no effect"),
        ("--cuda-graph-bs 1 2 4", "--cuda-graph-bs: the largest is"),
        ("--disable-cuda-graph-padding", "--disable-cuda-graph-padding: no effect"),
        ("--attention-backend fa3", "--attention-backend fa3: this backend is not here"),
        ("--load-format auto", "--load-format: no effect"),
        ("--log-requests", "--log-requests: no effect"),
        ("--enable-mixed-chunk", "--enable-mixed-chunk: no effect"),
        ("--enable-p2p-check", "--enable-p2p-check: no effect"),
        ("--enable-cache-report", "--enable-cache-report: no effect"),
        ("--enable-memory-saver", "--enable-memory-saver: no effect"),
        ("--kv-cache-dtype bf16", ""),
        ("--algorithm EAGLE --enable-multi-layer-eagle", "--enable-multi-layer-eagle: "),
        ("--algorithm DFLASH --speculative-dflash-draft-window-size 128", ""),
        ("--sglang-speculative-algorithm NGRAM --sglang-mem-fraction-static 0.5", ""),
    ],
)
def test_spellings_of_sglang_are_known(
    words: str, notice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert split_line(words.split()).problems == []
    notices = _plan(*words.split()).notices
    assert len(notices) == bool(notice)
    assert "".join(notices).startswith(notice)


def test_host_and_port_are_those_of_http() -> None:
    plan = _plan("--host", "0.0.0.0", "--port", "30000")
    assert (plan.gateway.host, plan.gateway.port) == ("0.0.0.0", 30000)
    assert (plan.target.host, plan.target.port) == ("127.0.0.1", 50051)
    assert ready_line(plan).startswith("ready: http://127.0.0.1:30000/v1  page: http://127.0.0.1")


def test_the_demo_on_a_cpu_shows_trees_unless_told_otherwise() -> None:
    plan = _plan()
    assert plan.target.candidate_wait_sequences == 1
    assert "--candidate-wait-sequences=1" in plan.target_arguments
    assert plan.drafts[0].settings.shape == TreeShape(4, 2, 8)
    assert not _plan("--candidate-wait-sequences", "0").target.candidate_wait_sequences
    assert not _plan(gpus=1).target.candidate_wait_sequences
    assert _plan("--algorithm", "NGRAM").target.candidate_wait_sequences == 1
    assert _plan("--algorithm", "STANDALONE,EAGLE3").target.candidate_wait_sequences == 1
    assert not _plan("--algorithm", "EAGLE3").target.candidate_wait_sequences
    chain = _plan("--speculative-eagle-topk", "1")
    assert chain.drafts[0].settings.shape == TreeShape(3, 1, 4)
    env = {"OUTRIDER_TARGET_CANDIDATE_WAIT_SEQUENCES": "0"}
    assert not _plan(env=env).target.candidate_wait_sequences


def test_the_browser_tests_settings_are_settings() -> None:
    """`make test` starts no browser."""
    assert _plan(env=EVERY_ROUND_HAS_A_TREE).target.candidate_wait_sequences == 256


def test_adaptive_speculation_chooses_the_depth_of_chains_that_have_none() -> None:
    flags = ("--speculative-adaptive", "--speculative-eagle-topk", "1")
    free = _plan(*flags)
    assert not free.drafts[0].settings.is_shape_pinned
    assert free.notices == ()
    assert _plan("--speculative-adaptive").notices == ()
    pinned = _plan(*flags, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4")
    [notice] = pinned.notices
    assert "the shape that is set stays" in notice


def test_variables_of_each_service_are_read() -> None:
    env = {"OUTRIDER_TARGET_PORT": "6000", "OUTRIDER_SERVE_LOG_DIR": "elsewhere"}
    plan = _plan(env=env)
    assert plan.target.port == 6000
    assert "--target=127.0.0.1:6000" in plan.drafts[0].arguments
    assert str(plan.launcher.log_dir) == "elsewhere"


def test_greedy_verification_for_ngram_is_refused_with_the_nearest() -> None:
    problem = _problems(env={"SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "True"})
    assert "say temperature 0" in problem
    assert _plan(env={"SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "False"}).notices == ()


def test_flags_come_from_a_file_which_the_line_beats(tmp_path: Path) -> None:
    file = tmp_path / "outrider.yaml"
    file.write_text(
        "speculative_algorithm: NGRAM\nport: 9000\ntrust-remote-code: true\n"
        "cuda-graph-bs: [1, 2, 16]\ndraft: {num-threads: 2}\n"
    )
    plan = _plan("--config", str(file), "--port", "9100")
    assert _algorithms(plan) == ("NGRAM",)
    assert (plan.gateway.port, plan.target.cuda_graph_max_bs) == (9100, 16)
    assert plan.drafts[0].settings.num_threads == 2
    assert len(plan.notices) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "Unable to open config file"),
        ("[1]", "must hold one mapping"),
        ("a: [b", "is not YAML"),
    ],
)
def test_a_file_that_holds_no_flags_is_refused(
    text: str | None, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "outrider.yaml"
    if text is not None:
        file.write_text(text)
    assert problem in _problems("--config", str(file))


def test_several_next_token_layers_are_asked_for_by_name(tmp_path: Path) -> None:
    model = _model_folder(tmp_path / "m", family="MiMo", text=', "num_nextn_predict_layers": 2')
    plan = _plan("--model", str(model), "--algorithm=EAGLE", "--enable-multi-layer-eagle")
    assert _algorithms(plan) == ("MTP",)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path}.*config.json"):
        check(_plan("--model", str(tmp_path)))


def test_busy_ports_are_named_with_a_way_out_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = _outrider("serve", "--port", str(port), "--log-dir", str(tmp_path / "logs"))
    assert result.returncode == 2
    assert f"port {port} is taken on 127.0.0.1: another server listens there; stop it, or set" in (
        result.stderr
    )
    assert not (tmp_path / "logs" / "target.log").exists()


def test_a_log_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    names = ("port", "target-port", "draft-port")
    ports = [f"--{name}={port}" for name, port in zip(names, free_ports(2), strict=False)]
    result = _outrider("serve", "--log-dir", str(tmp_path / "file" / "logs"), *ports)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"outrider serve: --log-dir is {tmp_path}/file/logs, which cannot be made: Not a directory"
    ]


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--prot", "1", "unknown flag --prot; did you mean --port?"),
        ("--nonsense", "1", "unknown flag --nonsense"),
        (
            *("--model", "/no/where"),
            "--model-path is /no/where: there is no such folder, and a model of the Hub is "
            "OWNER/NAME",
        ),
        (
            "--model",
            str(ROOT / "docs"),
            f"--model-path is {ROOT}/docs, a folder without config.json; a model has one",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(flag: str, value: str, problem: str) -> None:
    ports = free_ports(2)
    names = ("--port", "--target-port", "--draft-port")
    elsewhere = [word for name in names for word in (name, str(next(ports)))]
    result = _outrider("serve", flag, value, *elsewhere)
    assert result.stderr.splitlines() == [f"outrider serve: {problem}"]


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_an_installed_checkout_finds_its_measurements(command: str, tmp_path: Path) -> None:
    """An editable installation shows Python the packages, and the tests are none."""
    for package in ("gateway", "services", "shared"):
        (tmp_path / package).symlink_to(ROOT / package)
    result = subprocess.run(
        [sys.executable, "-m", "services.cli", command, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")


def test_check_says_what_a_line_would_start() -> None:
    result = _outrider("check", "--algorithm", "EAGLE3", "--trust-remote-code")
    assert result.returncode == 0, result.stderr
    assert "draft: EAGLE3, eagle3" in result.stdout
    assert "note: --trust-remote-code: no effect" in result.stdout


def test_check_counts_the_weights_that_would_be_read(tmp_path: Path) -> None:
    """Some repositories hold the same weights a second time, in another layout."""
    folder = write_byte_tokenizer(write_checkpoint(tmp_path / "model", "llama", TinyShape()))
    line = ("--model", str(folder), "--device", "cpu", "--algorithm", "NGRAM")
    size = in_words((folder / "model.safetensors").stat().st_size)
    assert f"weights {size} on disk" in check(_plan(*line))
    weights = folder / "model.safetensors"
    shutil.copy(weights, folder / "consolidated.safetensors")
    assert f"weights {size} on disk" in check(_plan(*line))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        check(_plan(*line))


def test_check_says_over_which_devices_a_target_is_spread() -> None:
    line = ("--device", "cpu", "--tp", "2", "--pp", "2", "--nnodes", "2")
    said = check(_plan(*line, "--dist-init-addr", "first:5000"))
    assert "on cpu, 2 processes of each of 2 hosts, port 50051" in said
    assert "memory of each process: about" in said


def test_check_adds_up_the_memory_of_a_target(tmp_path: Path) -> None:
    shape = TinyShape(max_position_embeddings=128)
    folder = write_byte_tokenizer(write_checkpoint(tmp_path / "model", "llama", shape))
    line = ("--model", str(folder), "--device", "cpu", "--max-total-tokens", "4096")
    said = check(_plan(*line))
    config = ModelConfig.from_folder(folder)
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    kv_bytes = (4096 + 16) * token_bytes
    weight_bytes = (folder / "model.safetensors").stat().st_size
    assert f"memory: about {in_words(weight_bytes + kv_bytes)} of " in said
    assert said.index(f"weights {in_words(weight_bytes)}, KV of 4,096 tokens {in_words(kv_bytes)}")
    rounded = check(_plan(*line, "--quantization", "int8"))
    assert f"weights {in_words(weight_bytes // 4)}, KV" in rounded
    assert "free: weights 76.35 MiB" in check(_plan("--device", "cpu")), "8 bits are widened"
    with pytest.raises(SettingsError, match="max-total-tokens is 10,000,000,000, which takes"):
        check(_plan(*line, "--max-total-tokens", "10000000000"))


def test_check_says_where_drafts_run_and_what_chains_are_cut_to() -> None:
    chain = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "1")
    said = check(_plan(*chain, "--speculative-num-draft-tokens", "64", "--device", "cpu"))
    assert "on disk, on cpu, port 50061" in said
    assert "6 tokens (64 asked; a chain of 5 has 6)" in said
    assert "draft: NGRAM, no model, port 50061" in check(_plan("--algorithm", "NGRAM"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--version",), "outrider "),
        (("--help",), "outrider serve MODEL_FLAGS"),
        (("serve", "--help"), "--speculative-num-draft-tokens"),
        (("check", "--help"), "usage: outrider check LINE"),
        (("draft", "--help"), "--speculative-ngram-capacity"),
    ],
)
def test_commands_explain_themselves(arguments: tuple[str, ...], part: str) -> None:
    result = _outrider(*arguments)
    assert result.returncode == 0, result.stderr
    assert part in result.stdout


def test_an_unknown_command_is_answered_with_those_there_are() -> None:
    result = _outrider("launch")
    assert result.returncode == 2
    assert "'launch' is not a command; there are serve, check, target" in result.stderr


@pytest.mark.parametrize(
    ("env", "count"),
    [({}, 2), ({"CUDA_VISIBLE_DEVICES": "1"}, 1), ({"CUDA_VISIBLE_DEVICES": ""}, 0)],
)
def test_gpus_are_counted_without_torch(env: dict[str, str], count: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus(env, tmp_path) == count


def test_one_gpu_is_shared_in_one_process_and_two_are_not() -> None:
    assert _plan(gpus=1).placement is Placement.EMBEDDED
    assert _plan("--device", "cpu", gpus=1).placement is Placement.REMOTE
    plan = _plan(gpus=2)
    assert plan.placement is Placement.REMOTE
    assert plan.drafts[0].settings.device == "cuda:1"


def test_a_draft_process_on_the_targets_gpu_leaves_it_the_memory() -> None:
    remote = ("--placement", "remote")
    assert _plan(*remote, gpus=1).drafts[0].settings.mem_fraction_static == 0.1
    named = _plan(*remote, "--draft-mem-fraction-static", "0.4", gpus=1)
    assert named.drafts[0].settings.mem_fraction_static == 0.4
    for plan in (_plan(gpus=2), _plan(*remote, "--device", "cpu", gpus=1), _plan()):
        assert plan.drafts[0].settings.mem_fraction_static is None


def test_a_language_model_on_a_cpu_drafts_ahead_unless_told_otherwise() -> None:
    def budget(*words: str, gpus: int = 0) -> int | None:
        return _plan(*words, gpus=gpus).drafts[0].settings.speculative_outcome_budget

    assert budget() == budget("--device", "cpu", gpus=1) == 2
    assert budget("--speculative-outcome-budget", "0") == 0
    others = budget("--algorithm", "NGRAM"), budget("--algorithm", "EAGLE3"), budget(gpus=2)
    assert others == (None, None, None)


def test_a_target_leaves_memory_for_the_features_of_remote_heads() -> None:
    def words(*line: str) -> list[str]:
        arguments = _plan(*line, "--placement", "remote").target_arguments
        return [word for word in arguments if "features" in word]

    flag = "--remote-draft-features"
    assert words("--speculative-algorithm", "EAGLE3") == [f"{flag}=1"]
    assert words("--speculative-algorithm", "STANDALONE") == []
    assert words("--speculative-algorithm", "EAGLE3", flag, "3") == [f"{flag}=3"]


def test_the_launcher_loads_no_web_framework() -> None:
    """They took two thirds of its start."""
    heavy = "{'fastapi', 'openai', 'torch'}"
    code = f"import sys, services.serve; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
