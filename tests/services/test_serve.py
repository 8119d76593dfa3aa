"""Flags, ports and messages of the launcher."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.serve import draft_spec, parse

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
    assert settings.algorithm == "STANDALONE"
    assert settings.ports == (8000, 8001, 50051, 50052, 50061, 50062)


def test_another_model_drafts_from_its_own_text_unless_told_otherwise(tmp_path: Path) -> None:
    model, draft = _model_folder(tmp_path / "model"), _model_folder(tmp_path / "draft")
    assert parse(["--model", str(model)]).algorithm == "NGRAM"
    assert parse(["--model", str(model), "--draft-model", str(draft)]).algorithm == "STANDALONE"
    assert parse(["--model", str(model), "--algorithm", "eagle3"]).algorithm == "EAGLE3"


@pytest.mark.parametrize("flags", [["--placement", "embedded"], ["--algorithm", "NONE"]])
def test_no_draft_process_means_no_draft_ports(flags: list[str]) -> None:
    settings = parse(flags)
    assert not settings.has_draft_process
    assert settings.ports == (8000, 8001, 50051, 50052)


@pytest.mark.parametrize(
    ("algorithm", "is_head"), [("MTP", True), ("DFLASH", True), ("EAGLE", True), ("NGRAM", False)]
)
def test_a_head_in_a_process_of_its_own_is_told_its_target(
    algorithm: str, is_head: bool, tmp_path: Path
) -> None:
    model = _model_folder(tmp_path / "model")
    arguments = draft_spec(parse(["--model", str(model), "--algorithm", algorithm])).arguments
    assert ("--target-model-path" in arguments) == (str(model) in arguments) == is_head
    demo = draft_spec(parse(["--algorithm", algorithm])).arguments
    assert "--target-model-path" not in demo


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
