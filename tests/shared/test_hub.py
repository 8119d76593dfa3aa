"""Models named by their id: found in the cache, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.errors import SettingsError
from shared.hub import is_hub_id, local_path, shown_name
from tests.helpers.hub_cache import add_to_cache

MODEL = Path("owner/tiny-model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def _files(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_a_model_of_the_cache_is_a_folder_with_the_ids_name(cache: Path, tmp_path: Path) -> None:
    add_to_cache(cache, str(MODEL), _files(tmp_path / "m", config="{}"))
    folder = local_path(MODEL, flag="--model-path")
    assert (folder / "config.json").read_text() == "{}"
    assert shown_name(folder) == str(MODEL)


def test_a_file_of_a_model_is_found(cache: Path, tmp_path: Path) -> None:
    add_to_cache(cache, str(MODEL), _files(tmp_path / "m", ids="[1]"))
    assert local_path(MODEL / "ids.json", flag="--speculative-token-map").read_text() == "[1]"


def test_a_revision_has_files_of_its_own(cache: Path, tmp_path: Path) -> None:
    add_to_cache(cache, str(MODEL), _files(tmp_path / "a", config="{}"))
    add_to_cache(cache, str(MODEL), _files(tmp_path / "b", config='{"a": 1}'), revision="v2")
    folder = local_path(MODEL, flag="--model-path", revision="v2")
    assert (folder / "config.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("name", ["owner/absent", "owner/absent/ids.pt"])
def test_what_is_not_cached_is_refused_with_what_to_do(cache: Path, name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        local_path(Path(name), flag="--model-path")
    [line] = refused.value.problems
    assert line.startswith(f"--model-path is {name}: there is no such path here")
    assert str(cache) in line
    assert "`hf download owner/absent`" in line


def test_a_folder_is_taken_before_the_hub(cache: Path) -> None:
    MODEL.mkdir(parents=True)
    assert local_path(MODEL, flag="--model-path") == MODEL
    assert shown_name(MODEL) == "tiny-model"


def test_a_built_in_model_has_one_name() -> None:
    for name in ("demo", "demo-moe"):
        folder = local_path(Path(name), flag="--model-path")
        assert shown_name(folder) == shown_name(folder / ".." / folder.name) == name


def test_a_folder_has_no_revisions(cache: Path) -> None:
    MODEL.mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"is a folder and has no revisions; leave .*'v2' out"):
        local_path(MODEL, flag="--model-path", revision="v2")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [("a/b", True), ("a/b/c.pt", True), ("/a/b", False), ("b", False), ("../a/b", False)],
)
def test_ids_have_an_owner_and_a_name(text: str, is_id: bool) -> None:
    assert is_hub_id(Path(text)) is is_id
