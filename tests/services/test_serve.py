"""Flags, ports and messages of the launcher."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.serve_settings import parse
from services.serve_specs import draft_spec

ROOT = Path(__file__).parents[2]


def _model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def _serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_demo_model_is_served_with_the_demo_draft() -> None:
    settings = parse([])
    assert settings.algorithms == ("STANDALONE",)
    assert settings.ports == (8000, 8001, 50051, 50052, 50061, 50062)


def test_another_model_drafts_from_its_own_text_unless_told_otherwise(tmp_path: Path) -> None:
    model, draft = _model_folder(tmp_path / "model"), _model_folder(tmp_path / "draft")
    assert parse(["--model", str(model)]).algorithms == ("NGRAM",)
    assert parse(["--model", str(model), "--draft-model", str(draft)]).algorithms == ("STANDALONE",)
    assert parse(["--model", str(model), "--algorithm", "eagle3"]).algorithms == ("EAGLE3",)


@pytest.mark.parametrize("flags", [["--placement", "embedded"], ["--algorithm", "NONE"]])
def test_no_draft_process_means_no_draft_ports(flags: list[str]) -> None:
    settings = parse(flags)
    assert not settings.draft_ports
    assert settings.ports == (8000, 8001, 50051, 50052)


def test_several_algorithms_are_as_many_drafts() -> None:
    settings = parse(["--algorithm", "standalone, NGRAM,ngram"])
    assert settings.algorithms == ("STANDALONE", "NGRAM")
    assert settings.ports[-4:] == (50061, 50062, 50063, 50064)
    specs = [draft_spec(settings, each) for each in settings.algorithms]
    assert [spec.name for spec in specs] == ["draft-standalone", "draft-ngram"]
    assert [spec.arguments[1] for spec in specs] == ["50061", "50063"]


@pytest.mark.parametrize("flag", ["--placement=embedded", "--draft-model=MODEL"])
def test_what_only_one_draft_can_have_is_refused_for_several(flag: str, tmp_path: Path) -> None:
    flag = flag.replace("MODEL", str(_model_folder(tmp_path / "model")))
    result = _serve("--algorithm", "NGRAM,STANDALONE", flag)
    assert result.returncode == 2
    assert "--algorithm names 2" in result.stderr


@pytest.mark.parametrize(
    ("algorithm", "is_head"), [("MTP", True), ("DFLASH", True), ("EAGLE", True), ("NGRAM", False)]
)
def test_a_head_in_a_process_of_its_own_is_told_its_target(
    algorithm: str, is_head: bool, tmp_path: Path
) -> None:
    model = _model_folder(tmp_path / "model")
    settings = parse(["--model", str(model), "--algorithm", algorithm])
    arguments = draft_spec(settings, algorithm).arguments
    assert ("--target-model-path" in arguments) == (str(model) in arguments) == is_head
    demo = draft_spec(parse(["--algorithm", algorithm]), algorithm).arguments
    assert "--target-model-path" not in demo


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--algorithm=NGRAM,FOO", "FOO is no algorithm; there are STANDALONE, NGRAM,"),
        ("--algorithm=,", "nothing is no algorithm"),
        ("--target-port=65535", "65535 is outside [1, 65534]"),
        ("--target-port=-1", "'-1' is no port number"),
        ("--gateway-port=0", "0 is outside [1, 65534]"),
        ("--gateway-port=50052", "ports wanted twice: 50052; each service takes two in a row"),
        ("--algorithm=NGRAM,STANDALONE --target-port=50064", "ports wanted twice: 50064"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags.split())
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    result = _serve("--model", str(tmp_path))
    assert result.returncode == 2
    assert f"{tmp_path} is not a model folder: it has no config.json" in result.stderr


def test_busy_ports_are_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = _serve("--gateway-port", str(port), "--log-dir", str(tmp_path / "logs"))
    assert result.returncode == 1
    assert f"ports in use on 127.0.0.1: {port}" in result.stderr
    assert not (tmp_path / "logs").exists()
