"""Settings: precedence, types, limits, and every problem at once."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import SettingsError
from shared.settings import (
    REQUIRED,
    ProcessSettings,
    address_problems,
    load_settings,
    setting,
    shown_settings,
    value_problems,
)


class Placement(enum.Enum):
    REMOTE = "remote"
    EMBEDDED = "embedded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings(ProcessSettings):
    """Serves as an example.

    More text.
    """

    port: int = setting(50051, "port to listen on", minimum=0, maximum=65535)
    wait_s: float = setting(0.5, "wait in seconds, 100% real", minimum=0)
    placement: Placement = setting(Placement.REMOTE, "where the draft lives")
    model: Path | None = setting(None, "folder of the model", flag="model-path")
    targets: tuple[str, ...] = setting((), "addresses")
    overlap: bool = setting(True, "overlap steps")
    api_key: str | None = setting(None, "key of the door", is_secret=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeedySettings:
    model: Path = setting(REQUIRED, "folder of the model")


def load(*argv: str, **env: str) -> PlainSettings:
    return load_settings(PlainSettings, service="target", arguments=argv, env=env)


def problems_of(*argv: str, **env: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(*argv, **env)
    return caught.value.problems


def test_defaults_hold_when_nothing_is_given() -> None:
    assert load() == PlainSettings()


def test_environment_beats_default_and_flag_beats_environment() -> None:
    assert load(OUTRIDER_TARGET_PORT="1").port == 1
    assert load("--port", "2", OUTRIDER_TARGET_PORT="1").port == 2


def test_shared_variable_sets_every_service_and_the_services_own_wins() -> None:
    assert load(OUTRIDER_LOG_LEVEL="error").log_level == "error"
    both = load(OUTRIDER_LOG_LEVEL="error", OUTRIDER_TARGET_LOG_LEVEL="debug")
    assert both.log_level == "debug"


def test_unshared_setting_has_no_variable_without_the_service() -> None:
    assert load(OUTRIDER_PORT="7").port == 50051


def test_every_kind_is_read() -> None:
    settings = load(
        *("--port=3", "--wait-s", "1.5", "--placement", "embedded", "--model-path", "/m"),
        *("--targets", "a:1", "--targets", "b:2", "--no-overlap", "--api-key", "k"),
    )
    assert settings == PlainSettings(
        port=3,
        wait_s=1.5,
        placement=Placement.EMBEDDED,
        model=Path("/m"),
        targets=("a:1", "b:2"),
        overlap=False,
        api_key="k",
    )


def test_repeated_setting_is_split_at_commas_in_the_environment() -> None:
    assert load(OUTRIDER_TARGET_TARGETS="a:1, b:2").targets == ("a:1", "b:2")


@pytest.mark.parametrize(("text", "value"), [("0", False), ("Yes", True), ("off", False)])
def test_switch_is_read_from_the_environment(text: str, value: bool) -> None:
    assert load(OUTRIDER_TARGET_OVERLAP=text).overlap is value


def test_empty_variable_counts_as_not_set() -> None:
    assert load(OUTRIDER_TARGET_PORT="").port == 50051


def test_last_of_a_repeated_single_flag_wins() -> None:
    assert load("--port", "1", "--port", "2").port == 2


def test_negative_number_is_a_value_not_a_flag() -> None:
    assert problems_of("--wait-s", "-1") == ("--wait-s is '-1'; it must be a number, at least 0",)


@pytest.mark.parametrize("text", ["nan", "inf", "70000", "-1", "3.5", "x"])
def test_number_out_of_range_is_refused_with_the_limit(text: str) -> None:
    assert problems_of(f"--port={text}") == (
        f"--port is {text!r}; it must be a whole number in [0, 65535]",
    )


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(
        *("--prot", "1", "stray", "--placement", "elsewhere", "--model-path"),
        OUTRIDER_TARGET_PORT="x",
        OUTRIDER_TARGET_WIAT_S="1",
        OUTRIDER_TARGET_OVERLAP="maybe",
        OUTRIDER_DRAFT_ANYTHING="belongs to another service",
    )
    assert sorted(problems) == sorted(
        [
            "unknown flag --prot; did you mean --port?",
            "unexpected argument 'stray'",
            "--placement is 'elsewhere'; it must be one of remote, embedded",
            "--model-path needs a value",
            "OUTRIDER_TARGET_PORT is 'x'; it must be a whole number in [0, 65535]",
            "unknown variable OUTRIDER_TARGET_WIAT_S; did you mean OUTRIDER_TARGET_WAIT_S?",
            "OUTRIDER_TARGET_OVERLAP is 'maybe'; it must be true or false",
        ]
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("wait", "wait-s"),
        ("wait-ms", "wait-s"),
        ("prt", "port"),
        ("targest", "targets"),
        ("x", None),
    ],
)
def test_only_a_misspelt_name_is_answered_with_another(typed: str, meant: str | None) -> None:
    hint = f"; did you mean --{meant}?" if meant else ""
    assert problems_of(f"--{typed}", "1") == (f"unknown flag --{typed}{hint}",)


def test_a_flag_is_reported_under_the_name_that_was_typed() -> None:
    arguments = ("--port=70000", "--overlap", "2")
    first, second = value_problems(
        PlainSettings, service="target", arguments=arguments, env={}, typed={"--port": "--gate"}
    )
    assert first.startswith("--gate is '70000'")
    assert second.startswith("--overlap is '2'")


def test_choices_are_read_in_any_case() -> None:
    assert load("--placement", "EMBEDDED", "--log-level=DEBUG") == PlainSettings(
        placement=Placement.EMBEDDED, log_level="debug"
    )


def test_bare_switch_and_given_switch_mean_the_same() -> None:
    assert load("--overlap").overlap is load("--overlap=true").overlap is True
    assert load("--overlap=false").overlap is load("--no-overlap").overlap is False


def test_variable_is_named_after_the_flag() -> None:
    assert load(OUTRIDER_TARGET_MODEL_PATH="/m").model == Path("/m")


def test_secret_is_not_shown_in_a_problem() -> None:
    [problem] = problems_of("--api-key=")
    assert problem == "--api-key is (not shown); it must be not empty"


def test_flag_that_wins_hides_no_problem_of_the_environment() -> None:
    assert len(problems_of("--port=1", OUTRIDER_TARGET_PORT="x")) == 1


def test_setting_without_default_is_required() -> None:
    with pytest.raises(SettingsError, match="--model is required: folder of the model"):
        load_settings(NeedySettings, service="draft", arguments=[], env={})
    read = load_settings(NeedySettings, service="draft", arguments=["--model", "/m"], env={})
    assert read.model == Path("/m")


def test_flags_show_effective_values_without_secrets() -> None:
    flags = shown_settings(load("--api-key", "k", "--targets", "a", "--targets", "b"))
    assert "k" not in flags.values()
    assert "api-key" not in flags
    assert flags["targets"] == "a,b"
    assert flags["overlap"] == "true"
    assert flags["placement"] == "remote"
    assert flags["model-path"] == ""


@given(port=st.integers(0, 65535), wait_s=st.floats(0, 1e9), overlap=st.booleans())
def test_shown_flags_are_read_back(port: int, wait_s: float, overlap: bool) -> None:
    settings = PlainSettings(port=port, wait_s=wait_s, overlap=overlap)
    argv = [f"--{flag}={text}" for flag, text in shown_settings(settings).items() if text]
    assert load(*argv) == settings


def test_help_tells_flags_defaults_limits_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help", "--port", "x")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "outrider-target",
        "Serves as an example.",
        "port to listen on (a whole number in [0, 65535]) (default: 50051)",
        "100% real",
        "--no-overlap",
        "OUTRIDER_TARGET_",
        "(default: (secret))",
    ):
        assert part in text


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:50051", "target:50051", "target.example:1", "[::1]:65535", "[fe80::1%e0]:9"),
        *("dns:target:50051", "dns:///target:50051", "dns://8.8.8.8/target:50051"),
        *("ipv4:10.0.0.1:50051,10.0.0.2:50051", "ipv6:[::1]:50051"),
        *("unix:run/target.sock", "unix:///run/target.sock", "unix-abstract:target", "vsock:2:9"),
    ],
)
def test_what_names_a_port_or_needs_none_is_taken(address: str) -> None:
    assert address_problems("--target", [address]) == ()


@pytest.mark.parametrize(
    "address",
    [
        *("", "target", "127.0.0.1", "::1", "[::1]", "target:", ":50051", "target:http"),
        *("target:0", "target:65536", "target:50051/", "http://target:50051", "a:1,b:2", "a:1 "),
        *(
            "dns:target",
            "dns:50051",
            "dns:///target",
            "ipv4:10.0.0.1",
            "ipv4:10.0.0.1:9,10.0.0.2",
            "unix:",
        ),
    ],
)
def test_what_would_be_dialled_elsewhere_is_named(address: str) -> None:
    [problem] = address_problems("--target", ["good:1", address])
    assert problem.startswith(f"--target is {address!r}; it must be HOST:PORT")
