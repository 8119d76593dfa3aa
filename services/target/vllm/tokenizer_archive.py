"""The files with which a gateway turns text into a model's tokens and back, as one archive."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointError

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")
_LARGEST_FILE_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that the format knows


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """A ZIP archive.

    Attributes:
        sha256: of `data`, lower-case hexadecimal. The same files always give the same.
    """

    data: bytes
    sha256: str


def tokenizer_archive(folders: Sequence[Path]) -> TokenizerArchive:
    """Packs the files that exist; a file of an earlier folder hides that of a later one.

    Raises:
        CheckpointError: there is nothing to pack, or a file is too large to be one of these.
    """
    packed = io.BytesIO()
    paths = _paths(folders)
    if not paths:
        raise CheckpointError(f"{folders[0]} holds no files of a tokenizer")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                raise CheckpointError(f"{path} has more than {_LARGEST_FILE_BYTES:,} bytes")
            info = zipfile.ZipInfo(path.name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    data = packed.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())


def _paths(folders: Sequence[Path]) -> list[Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _candidates(folder):
            if path.is_file():
                found.setdefault(path.name, path)
    return [found[name] for name in sorted(found)]


def _candidates(folder: Path) -> Iterator[Path]:
    for name in _NAMES:
        yield folder / name
    for pattern in _PATTERNS:
        yield from folder.glob(pattern)
