"""Models named by their id on the Hugging Face Hub instead of by a folder.

`meta-llama/Llama-3.1-8B-Instruct` is a model, `thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt` a
file of one. Files come through `huggingface_hub`, with its cache (`HF_HOME`), token (`HF_TOKEN`),
offline mode (`HF_HUB_OFFLINE=1`) and progress bars. A path that exists is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from shared.errors import SettingsError

BUILT_IN: Mapping[str, Path] = MappingProxyType(
    {"demo-moe": Path(__file__).parent / "demo" / "demo-moe"}
)
"""Models of this repository that are named without a path."""

_MODEL_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_FILE_ID = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)/(.+)")
_CACHED_PREFIX = "models--"
# What a server reads: configuration, tokenizer, chat template, weights in one of two formats.
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
_OLD_WEIGHTS = "*.bin"
_SUBFOLDERS = "*/*"


def is_hub_id(path: Path) -> bool:
    """Whether a path can only be the id of a model, or of a file of one: nothing is there."""
    text = str(path)
    has_id = _MODEL_ID.fullmatch(text) or _FILE_ID.fullmatch(text)
    return has_id is not None and not path.exists()


def local_path(path: Path, *, flag: str, revision: str | None = None) -> Path:
    """Returns where a model, or a file of one, is on this machine, after fetching it if need be.

    Args:
        flag: that named it, for messages.
        revision: branch, tag or commit on the Hub; its main branch when None.

    Raises:
        SettingsError: it is neither here nor to be had, or a folder is given with a revision.
    """
    if str(path) in BUILT_IN and not path.exists():
        path = BUILT_IN[str(path)]
    if not is_hub_id(path):
        if revision is not None and not _is_snapshot(path):
            raise SettingsError(
                (
                    f"{flag} is {path}, which is a folder and has no revisions; leave revision "
                    f"{revision!r} out, or give the model's id on the Hugging Face Hub",
                )
            )
        return path
    file = _FILE_ID.fullmatch(str(path))
    if file is not None:
        return _file(file[1], file[2], revision, flag)
    return _folder(str(path), revision, flag)


def shown_name(folder: Path) -> str:
    """Returns the name of a model for people: its id when it lies in the Hub's cache."""
    resolved = folder.resolve()
    if _is_snapshot(resolved):
        return resolved.parent.parent.name.removeprefix(_CACHED_PREFIX).replace("--", "/")
    return resolved.name


def _is_snapshot(folder: Path) -> bool:
    """Whether a folder is that of one revision in the Hub's cache."""
    parent = folder.parent
    return parent.name == "snapshots" and parent.parent.name.startswith(_CACHED_PREFIX)


def _folder(model_id: str, revision: str | None, flag: str) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(allow_patterns: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=list(allow_patterns),
                ignore_patterns=[_SUBFOLDERS],
            )
        )

    try:
        folder = fetch(allow_patterns=_FILES)
        if not any(folder.glob("*.safetensors")):
            fetch(allow_patterns=(*_FILES, _OLD_WEIGHTS))
    except (OSError, ValueError) as error:
        raise SettingsError((_refusal(model_id, revision, flag, error),)) from error
    return folder


def _file(model_id: str, name: str, revision: str | None, flag: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_id, name, revision=revision))
    except (OSError, ValueError) as error:
        raise SettingsError((_refusal(f"{model_id}/{name}", revision, flag, error),)) from error


def _refusal(model_id: str, revision: str | None, flag: str, error: Exception) -> str:
    """Says why a model could not be had, and what to do."""
    from huggingface_hub import errors

    named = model_id if revision is None else f"{model_id} at revision {revision}"
    if isinstance(error, errors.GatedRepoError):
        why = (
            "its owners ask you to accept their terms: do so on its page at huggingface.co, then "
            "log in with `hf auth login` or set HF_TOKEN"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "it has no such revision"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why = (
            f"it is not in the cache ({_cache_folder()}), and huggingface.co cannot be reached or "
            f"HF_HUB_OFFLINE is set. With a network: `hf download {_repository(model_id)}`; or "
            f"give a local folder"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "it is unknown or not shown to you; check the name"
    elif isinstance(error, errors.EntryNotFoundError):
        why = "it has no such file"
    else:
        why = f"{type(error).__name__}: {error}"
    return f"{flag} is {named}: there is no such path here, and as a model of the Hub {why}"


def _repository(model_id: str) -> str:
    return "/".join(model_id.split("/")[:2])


def _cache_folder() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
