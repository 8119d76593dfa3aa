"""The checked-in stubs are those of the contracts and run on every supported runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protos.generate import PROTOS, STUBS, drift, rewritten


def test_checked_in_stubs_are_those_of_the_contracts() -> None:
    command = [sys.executable, str(PROTOS / "generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["changed", "missing", "extra"])
def test_drift_is_named(tmp_path: Path, name: str) -> None:
    fresh, checked_in = tmp_path / "fresh", tmp_path / "checked_in"
    for folder in (fresh, checked_in):
        (folder / "v1").mkdir(parents=True)
        (folder / "v1" / "same_pb2.py").write_text("same")
    if name != "extra":
        (fresh / "v1" / "a_pb2.py").write_text("new")
    if name != "missing":
        (checked_in / "v1" / "a_pb2.py").write_text("old")
    assert drift(fresh, checked_in) == ["v1/a_pb2.py"]


def test_stubs_import_each_other_below_shared() -> None:
    source = "import grpc\nfrom outrider.types.v1 import a_pb2 as b\nimport outrider.x\n"
    assert rewritten(source) == (
        "import grpc\nfrom shared.pb.outrider.types.v1 import a_pb2 as b\n"
        "import shared.pb.outrider.x\n"
    )


def test_stubs_are_not_tied_to_the_version_that_wrote_them() -> None:
    guards = ("ValidateProtobufRuntimeVersion", "GRPC_GENERATED_VERSION", "runtime_version")
    for stub in STUBS.rglob("*_pb2*.py"):
        assert not [guard for guard in guards if guard in stub.read_text()], stub


def test_descriptors_keep_the_names_of_the_contracts() -> None:
    from shared.pb.outrider.target.v1 import target_service_pb2 as pb

    assert pb.DESCRIPTOR.name == "outrider/target/v1/target_service.proto"
    assert pb.DESCRIPTOR.services_by_name["TargetService"].full_name == (
        "outrider.target.v1.TargetService"
    )
