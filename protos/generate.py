"""Writes the checked-in Python stubs of the contracts to `shared/pb/`.

    python -m protos.generate           # write
    python -m protos.generate --check   # fail when the checked-in stubs differ from the contracts

The output of protoc is changed in four ways. Imports are moved below `shared.pb`, so that the stubs
own no top-level name. The version guards are dropped: a stub holds a serialized descriptor and
method names, which older runtimes read as well, while the guards would tie every host to the
newest protobuf and grpcio; `pyproject.toml` states the versions that are supported. Comments, which
stand in the contracts, and gRPC's experimental static methods are dropped for size, and submessages
are no mappings, because `mypy --strict` refuses a bare `Mapping`.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
STUBS = PROTOS.parent / "shared" / "pb"
_IMPORT = re.compile(r"^(from|import) (outrider|smg|vllm)\b", re.MULTILINE)
_PROTOBUF_GUARD = re.compile(
    r"^from google\.protobuf import runtime_version as _runtime_version\n"
    r"|^_runtime_version\.ValidateProtobufRuntimeVersion\(.*?^\)\n"
    r"|^# Protobuf Python Version: [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)
_GRPC_GUARD = re.compile(
    r"^import warnings\n"
    r"|^GRPC_GENERATED_VERSION = .*?^    \)\n"
    r"|^GRPC_(GENERATED_)?VERSION: str\n",
    re.MULTILINE | re.DOTALL,
)
_COMMENT_AS_BODY = re.compile(r'(->[^\n]+:)\n[ \t]*""".*?"""\n', re.DOTALL)
_COMMENT = re.compile(r'^[ \t]*""".*?"""\n', re.MULTILINE | re.DOTALL)
_EXPERIMENTAL = re.compile(
    r"^ # This class is part of an EXPERIMENTAL API\.\nclass .*?(?=^class |\Z)",
    re.MULTILINE | re.DOTALL,
)
_FIELD_NUMBER = re.compile(r"^ +\w+_FIELD_NUMBER: _ClassVar\[int\]\n", re.MULTILINE)


def generate(folder: Path) -> None:
    """Writes the stubs of every contract below `folder`, an existing empty folder."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    outputs = [f"--{plugin}_out={folder}" for plugin in ("python", "pyi", "grpc_python")]
    outputs.append(f"--mypy_grpc_out=only_async:{folder}")
    # Beside the interpreter, which need not be on the PATH.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    paths = [f"-I{PROTOS}", f"-I{well_known}"]
    code = protoc.main(
        ["protoc", *paths, f"--plugin=protoc-gen-mypy_grpc={plugin}", *outputs, *sources]
    )
    if code != 0:
        sys.exit(code)
    for stub in (*folder.rglob("*.py"), *folder.rglob("*.pyi")):
        stub.write_text(rewritten(stub.read_text()))
    for package in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        (package / "__init__.py").write_text("")


def rewritten(stub: str) -> str:
    """Returns the stub with imports below `shared.pb`, and without what is dropped."""
    stub = stub.replace(", _Mapping]", "]")
    stub = _COMMENT_AS_BODY.sub(r"\1 ...\n", stub)
    for left_out in (_PROTOBUF_GUARD, _GRPC_GUARD, _EXPERIMENTAL, _COMMENT, _FIELD_NUMBER):
        stub = left_out.sub("", stub)
    return _IMPORT.sub(r"\1 shared.pb.\2", stub)


def drift(fresh: Path, checked_in: Path) -> list[str]:
    """Returns the relative paths that differ between two stub folders."""
    names = {
        str(path.relative_to(root))
        for root in (fresh, checked_in)
        for path in root.rglob("*.py*")
        if "__pycache__" not in path.parts
    }
    _, different, missing = filecmp.cmpfiles(fresh, checked_in, sorted(names), shallow=False)
    return different + missing


def main() -> None:
    """Writes or checks the stubs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        generate(fresh)
        if not arguments.check:
            shutil.rmtree(STUBS, ignore_errors=True)
            shutil.copytree(fresh, STUBS)
            return
        stale = drift(fresh, STUBS)
    if stale:
        sys.exit("stubs are not those of the contracts; run `make protos`:\n" + "\n".join(stale))


if __name__ == "__main__":
    main()
