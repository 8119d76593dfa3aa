"""Flags of the draft process: defaults, names and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft.drafters.ngram import MatchType
from services.draft.settings import Algorithm, DraftSettings
from shared.errors import SettingsError
from shared.settings import load_settings
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
def test_a_part_of_a_shape_is_refused(given: tuple[str, ...]) -> None:
    assert "or none of them" in _problems(*given)


def test_ngram_takes_its_draft_tokens_alone() -> None:
    assert _read(*NGRAM, TOKENS, "20").shape.num_draft_tokens == 20
    assert "or none of them" in _problems(*NGRAM, TOPK, "5")


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
    assert settings.shape == TreeShape(8, 6, 12)


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
        (("--speculative-algorithm", "EAGLE3"), "STANDALONE, NGRAM"),
        (("--speculative-token-map", "x"), "--speculative-token-map"),
        ((*NGRAM, "--speculative-draft-model-path", "/m"), "NGRAM has no model"),
        ((*NGRAM, "--speculative-ngram-min-bfs-breadth", "11"), "must not exceed"),
        (("--target", "a:1", "--target", "a:1"), "none twice"),
        (("--log-level", "loud"), "'loud' is not one of"),
        (("--device", "tpu"), "'tpu' is not auto, cpu"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[str, ...], part: str) -> None:
    assert part in _problems(*arguments)


def test_standalone_is_the_default_algorithm() -> None:
    assert _read().speculative_algorithm is Algorithm.STANDALONE
