"""Flags of the draft process: defaults, names and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft import drafter_factory
from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import OUTCOME_BUDGET, outcome_budget
from services.draft.settings import DraftSettings, checked_models
from shared.errors import SettingsError
from shared.model_options import AttentionBackend, Dtype
from shared.ngram import MatchType
from shared.settings import load_settings, shown_settings
from shared.tokens import TreeShape

STEPS, TOPK, TOKENS = (
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)
NGRAM = ("--speculative-algorithm", "NGRAM")


def _read(*arguments: str) -> DraftSettings:
    return load_settings(DraftSettings, service="draft", arguments=arguments, env={})


def _problems(*arguments: str) -> str:
    with pytest.raises(SettingsError) as caught:
        _read(*arguments)
    return caught.value.message


def test_the_automatic_shapes_are_those_of_the_algorithms() -> None:
    assert _read().shape == TreeShape(3, 1, 4)
    ngram = _read(*NGRAM).shape
    assert (ngram.topk, ngram.num_draft_tokens) == (10, 12)


def test_a_shape_is_set_as_a_whole() -> None:
    assert _read(STEPS, "5", TOPK, "4", TOKENS, "8").shape == TreeShape(5, 4, 8)


@pytest.mark.parametrize("given", [(STEPS, "5"), (TOKENS, "5"), (STEPS, "5", TOPK, "4")])
def test_a_part_that_names_no_shape_is_refused(given: tuple[str, ...]) -> None:
    assert "a tree needs all of --speculative-num-steps" in _problems(*given)


@pytest.mark.parametrize(
    ("given", "shape", "is_pinned"),
    [
        ((TOPK, "1"), TreeShape(3, 1, 4), False),
        ((TOPK, "1", STEPS, "5"), TreeShape(5, 1, 6), True),
        ((TOPK, "1", TOKENS, "6"), TreeShape(5, 1, 6), True),
        ((TOPK, "1", STEPS, "3", TOKENS, "8"), TreeShape(3, 1, 4), True),
    ],
)
def test_a_topk_of_one_is_a_chain_of_the_depth_that_is_set(
    given: tuple[str, ...], shape: TreeShape, is_pinned: bool
) -> None:
    settings = _read(*given)
    assert (settings.shape, settings.is_shape_pinned) == (shape, is_pinned)


@pytest.mark.parametrize("rest", [(), (STEPS, "1", TOPK, "1")])
def test_dflash_takes_the_rows_of_its_block_alone(rest: tuple[str, ...]) -> None:
    flags = ("--speculative-algorithm", "DFLASH", TOKENS, "8", *rest)
    assert _read(*flags).shape == TreeShape(7, 1, 8)


def test_ngram_takes_its_draft_tokens_alone() -> None:
    assert _read(*NGRAM, TOKENS, "20").shape.num_draft_tokens == 20
    assert "a tree needs all of" in _problems(*NGRAM, TOPK, "5")


def test_ngram_flags_reach_the_trie() -> None:
    settings = _read(
        *NGRAM,
        *("--speculative-ngram-min-bfs-breadth", "2"),
        *("--speculative-ngram-max-bfs-breadth", "6"),
        *("--speculative-ngram-match-type", "PROB"),
        *("--speculative-ngram-max-trie-depth", "9"),
        *("--speculative-ngram-capacity", "1000"),
    )
    options = settings.ngram_options
    assert (options.match_type, options.max_trie_depth, options.capacity, options.min_breadth) == (
        MatchType.PROB,
        9,
        1_000,
        2,
    )
    assert settings.shape == TreeShape(8, 6, 9)


def test_ngram_defaults_are_those_users_know() -> None:
    options = _read(*NGRAM).ngram_options
    assert options.match_type is MatchType.BFS
    assert (options.max_trie_depth, options.capacity, options.min_breadth) == (18, 10_000_000, 1)


def test_targets_may_be_repeated_and_have_a_default() -> None:
    assert _read().target == ("127.0.0.1:50051",)
    assert _read("--target", "a:1", "--target", "b:2").target == ("a:1", "b:2")


def test_the_maintenance_port_follows_the_port() -> None:
    assert (_read().port, _read().admin_port) == (50061, 50062)
    assert _read("--port", "7000").admin_port == 7001
    assert _read("--port", "0").admin_port == 0
    assert _read("--maintenance-port", "9").admin_port == 9


def test_the_demo_draft_is_the_default_model() -> None:
    assert _read().model_folder.parts[-3:] == ("shared", "demo", "draft")
    assert _read("--speculative-draft-model-path", "/m/x").model_folder == Path("/m/x")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--speculative-algorithm", "MEDUSA"), "STANDALONE, NGRAM"),
        (("--speculative-token-map", "x"), "--speculative-token-map: STANDALONE has no head"),
        ((*NGRAM, "--target-model-path", "x"), "--target-model-path: NGRAM reads nothing"),
        ((*NGRAM, "--speculative-draft-model-path", "/m"), "NGRAM has no model"),
        ((*NGRAM, "--speculative-ngram-min-bfs-breadth", "11"), "must not exceed"),
        (("--target", "a:1", "--target", "a:1"), "none twice"),
        (("--target", "a"), "--target is 'a'; it must be HOST:PORT"),
        (("--log-level", "loud"), "--log-level is 'loud'; it must be one of"),
        (("--device", "tpu"), "'tpu' is not auto, cpu"),
        (("--speculative-draft-model-quantization", "int4"), "one of unquant, int8, fp8"),
        (("--speculative-attention-mode", "verify"), "one of prefill, decode"),
        (("--speculative-draft-attention-backend", "fa9"), "one of auto, torch, triton"),
        (("--speculative-draft-load-format", "gguf"), "one of auto, safetensors, pt"),
        (("--speculative-draft-window-size", "8"), "--speculative-draft-window-size is '8'"),
        (
            ("--speculative-draft-window-size", "200", "--context-length", "100"),
            "--speculative-draft-window-size is 200; it must not exceed --context-length, 100",
        ),
        (
            ("--enable-cuda-graph", "--speculative-algorithm", "NGRAM"),
            "--enable-cuda-graph: NGRAM runs without graphs; STANDALONE, EAGLE, EAGLE3 and MTP",
        ),
        (
            ("--enable-cuda-graph", "--speculative-algorithm", "DFLASH"),
            "--enable-cuda-graph: DFLASH runs without graphs",
        ),
        ((*NGRAM, "--tp-size", "2"), "--tp-size: NGRAM has no model"),
        (
            ("--tp-size", "2", "--speculative-algorithm", "EAGLE3"),
            "--tp-size is 2; EAGLE3 drafts by a head of a few layers",
        ),
        (
            ("--tp-size", "4", "--speculative-algorithm", "NEXTN"),
            "--tp-size is 4; NEXTN drafts by a head of a few layers",
        ),
        (("--tp-size", "65"), "--tp-size is '65'"),
        (("--speculative-outcome-budget", "65"), "--speculative-outcome-budget is '65'"),
        (("--speculative-adaptive",), "unknown flag --speculative-adaptive"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[str, ...], part: str) -> None:
    assert part in _problems(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculative-draft-load-format", "pt"),
        ("--speculative-draft-model-quantization", "int8"),
        ("--speculative-attention-mode", "decode"),
        ("--speculative-draft-attention-backend", "torch"),
        ("--speculative-draft-window-size", "100"),
    ],
)
def test_flags_of_a_model_are_echoed_and_refused_without_one(arguments: tuple[str, ...]) -> None:
    flag, value = arguments
    assert shown_settings(_read(*arguments))[flag.removeprefix("--")] == value
    assert _problems(*NGRAM, *arguments) == f"{flag}: NGRAM has no model"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [((), ""), (("--enable-cuda-graph",), "true"), (("--enable-cuda-graph=false",), "false")],
)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "MTP"])
def test_heads_have_graphs_unless_told(
    algorithm: str, arguments: tuple[str, ...], shown: str
) -> None:
    settings = _read("--speculative-algorithm", algorithm, *arguments)
    assert shown_settings(settings)["enable-cuda-graph"] == shown


def _head(algorithm: str, target: Path, *arguments: str) -> DraftSettings:
    flags = ("--speculative-algorithm", algorithm, "--target-model-path", str(target))
    return _read(*flags, *arguments)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("LlamaForCausalLM", TreeShape(5, 4, 8)),
        ("Qwen2ForCausalLM", TreeShape(3, 1, 4)),
        ("MistralForCausalLM", TreeShape(3, 1, 4)),
    ],
)
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "EAGLE3"])
def test_the_automatic_shape_of_a_head_is_that_of_its_target(
    algorithm: str, architecture: str, shape: TreeShape, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    assert _head(algorithm, tmp_path).shape == shape
    given = (STEPS, "2", TOPK, "3", TOKENS, "7")
    assert _head(algorithm, tmp_path, *given).shape == TreeShape(2, 3, 7)


def test_nextn_is_another_name_of_eagle(tmp_path: Path) -> None:
    assert _head("NEXTN", tmp_path).algorithm is Algorithm.EAGLE
    assert _head("EAGLE3", tmp_path).algorithm is Algorithm.EAGLE3


def test_heads_default_to_those_of_the_demo_target() -> None:
    eagle, eagle3 = (_read("--speculative-algorithm", name) for name in ("NEXTN", "EAGLE3"))
    assert eagle.model_folder.parts[-2:] == ("heads", "eagle")
    assert eagle3.model_folder.parts[-2:] == ("heads", "eagle3")
    assert eagle.target_folder.parts[-2:] == ("demo", "target")


def test_a_head_takes_a_part_of_a_shape_no_more_than_others_do(tmp_path: Path) -> None:
    flags = ("--speculative-algorithm", "EAGLE", STEPS, "3")
    assert "a tree needs all of" in _problems(*flags)


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN"])
def test_without_a_head_the_targets_own_next_token_layers_draft(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}')
    settings = checked_models(_head(name, tmp_path))
    assert settings.algorithm is Algorithm.MTP
    assert (settings.model_folder, settings.shape) == (tmp_path, TreeShape(1, 1, 2))
    with_head = _head(name, tmp_path, "--speculative-draft-model-path", "/heads/own")
    assert with_head.algorithm is Algorithm.EAGLE


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN", "EAGLE3", "DFLASH"])
def test_the_demos_heads_are_for_the_demo_model_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(SettingsError, match=f"{name} needs a head that was trained for"):
        checked_models(_head(name, tmp_path))
    assert checked_models(_read("--speculative-algorithm", name)).is_of_demo


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("bf16", "bfloat16"), ("half", "float16"), ("FP32", "float32")]
)
def test_element_types_have_short_names(spelling: str, dtype: str) -> None:
    assert _read("--dtype", spelling).dtype is Dtype(dtype)


@pytest.mark.parametrize(
    ("given", "backend"),
    [("fa3", "auto"), ("flashinfer", "auto"), ("torch_native", "torch"), ("triton", "triton")],
)
def test_backends_of_sglang_have_a_nearest(given: str, backend: str) -> None:
    settings = _read("--speculative-draft-attention-backend", given)
    assert settings.speculative_draft_attention_backend is AttentionBackend(backend)


def test_other_spellings_of_flags_are_known() -> None:
    settings = _read("--speculative-algo", "NEXTN", "--speculative-draft", "/h", "--tp=1")
    assert settings.speculative_algorithm is Algorithm.NEXTN
    assert settings.speculative_draft_model_path == Path("/h")
    window = _read("--speculative-dflash-draft-window-size", "128")
    assert window.speculative_draft_window_size == 128


def test_standalone_is_the_default_algorithm() -> None:
    assert _read().speculative_algorithm is Algorithm.STANDALONE


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ((), 0),
        (("--target", "localhost:1", "--target", "unix:/tmp/a"), 0),
        (("--target", "[::1]:1", "--target", "127.0.1.1:1"), 0),
        (("--target", "host-a:50051"), OUTCOME_BUDGET),
        (("--target", "127.0.0.1:1", "--target", "10.0.0.7:1"), OUTCOME_BUDGET),
        (("--target", "host-a:50051", "--speculative-outcome-budget", "0"), 0),
        (("--speculative-outcome-budget", "3"), 3),
        (("--target", "host-a:50051", "--speculative-algorithm", "EAGLE3"), 0),
    ],
)
def test_a_language_model_on_a_gpu_drafts_ahead_for_a_target_elsewhere(
    arguments: tuple[str, ...], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _read(*arguments)
    is_asked = settings.speculative_outcome_budget is not None
    assert outcome_budget(settings) == (budget if is_asked else 0), "there is no GPU"
    monkeypatch.setattr(drafter_factory, "compiles_kernels", lambda settings: True)
    assert outcome_budget(settings) == budget
