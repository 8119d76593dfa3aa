"""Writes the checked-in Python stubs of the contracts to `shared/pb/`.

    python -m protos.generate           # write
    python -m protos.generate --check   # fail when the checked-in stubs differ from the contracts

Two changes are made to what protoc writes. Imports are moved below `shared.pb`, so that the stubs
own no top-level name. The version guards are dropped: a stub holds a serialized descriptor and
method names, which older runtimes read as well, while the guards would tie every host to the
newest protobuf and grpcio; `pyproject.toml` states the versions that are supported.
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


def generate(folder: Path) -> None:
    """Writes the stubs of every contract below `folder`, an existing empty folder."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    outputs = [f"--{plugin}_out={folder}" for plugin in ("python", "grpc_python", "mypy")]
    outputs.append(f"--mypy_grpc_out=only_async:{folder}")
    # Beside the interpreter, which need not be on the PATH.
    scripts = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    paths = [f"-I{PROTOS}", f"-I{well_known}"]
    code = protoc.main(["protoc", *paths, *plugins, *outputs, *sources])
    if code != 0:
        sys.exit(code)
    for stub in (*folder.rglob("*.py"), *folder.rglob("*.pyi")):
        stub.write_text(rewritten(stub.read_text()))
    for package in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        (package / "__init__.py").write_text("")


def rewritten(stub: str) -> str:
    """Returns the stub with imports below `shared.pb` and without version guards."""
    stub = _PROTOBUF_GUARD.sub("", stub)
    stub = _GRPC_GUARD.sub("", stub)
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
