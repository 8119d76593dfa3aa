"""Models named by their id on the Hugging Face Hub instead of by a folder.

`meta-llama/Llama-3.1-8B-Instruct` is a model, `thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt` a
file of a model. Files are fetched by `huggingface_hub`, with its cache (`HF_HOME`), token
(`HF_TOKEN`), offline mode (`HF_HUB_OFFLINE=1`) and progress bars. A path that exists is used as is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from shared.errors import SettingsError
from shared.settings_field import declared_fields

S = TypeVar("S")

_DEMO = Path(__file__).parent / "demo"
BUILT_IN: Mapping[str, Path] = MappingProxyType(
    {"demo": _DEMO / "target", "demo-moe": _DEMO / "demo-moe"}
)
"""Models of this repository, which have a name instead of a path."""

_MODEL_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_FILE_ID = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)/(.+)")
_CACHED_PREFIX = "models--"
# The files that a server reads: configuration, tokenizer, chat template, weights in two formats.
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
_PICKLED_WEIGHTS = "*.bin"
_SUBFOLDERS = "*/*"


def is_hub_id(path: Path) -> bool:
    """Whether a path has the form of a model's or model file's id, and does not exist."""
    text = str(path)
    has_id = _MODEL_ID.fullmatch(text) or _FILE_ID.fullmatch(text)
    return has_id is not None and not path.exists()


def local_path(path: Path, *, flag: str, revision: str | None = None) -> Path:
    """Returns the local path of a model, or of a file of a model, which is fetched if necessary.

    Args:
        flag: the flag with the path, for messages.
        revision: branch, tag or commit on the Hub; None is the main branch.

    Raises:
        SettingsError: the model is not here and cannot be fetched, or a folder has a revision.
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


def with_local_models(settings: S, revisions: Mapping[str, str] = MappingProxyType({})) -> S:
    """Returns settings with local paths in place of the ids of models; see `local_path`.

    Args:
        revisions: the field of a model's revision by that of its path; unset in the result.
    """
    given: dict[str, Any] = dict.fromkeys(revisions.values())
    for field in declared_fields(type(settings)):
        path = getattr(settings, field.name)
        if field.is_model and path is not None:
            revision = revisions.get(field.name)
            named = None if revision is None else getattr(settings, revision)
            given[field.name] = local_path(path, flag=field.flag, revision=named)
    return replace(settings, **given)  # type: ignore[type-var]


def shown_name(folder: Path) -> str:
    """Returns the displayed name of a model: its id if it is in the Hub's cache, its own if it is
    built in, else its folder's name."""
    resolved = folder.resolve()
    for name, built_in in BUILT_IN.items():
        if resolved == built_in.resolve():
            return name
    if _is_snapshot(resolved):
        return resolved.parent.parent.name.removeprefix(_CACHED_PREFIX).replace("--", "/")
    return resolved.name


def _is_snapshot(folder: Path) -> bool:
    """Whether a folder is a revision in the Hub's cache."""
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
            fetch(allow_patterns=(*_FILES, _PICKLED_WEIGHTS))
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
    """Returns why a model could not be fetched, and what to do."""
    from huggingface_hub import constants, errors

    named = model_id if revision is None else f"{model_id} at revision {revision}"
    if isinstance(error, errors.GatedRepoError):
        why = (
            "its owners ask you to accept their terms: do so on its page at huggingface.co, then "
            "log in with `hf auth login` or set HF_TOKEN"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "it has no such revision"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cache, repository = constants.HF_HUB_CACHE, "/".join(model_id.split("/")[:2])
        why = (
            f"it is not in the cache ({cache}), and huggingface.co cannot be reached or "
            f"HF_HUB_OFFLINE is set. With a network: `hf download {repository}`; or give a local "
            f"folder"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "it is unknown or not shown to you; check the name"
    elif isinstance(error, errors.EntryNotFoundError):
        why = "it has no such file"
    else:
        why = f"{type(error).__name__}: {error}"
    return f"{flag} is {named}: there is no such path here, and as a model of the Hub {why}"
