"""As much of kustomize as the manifests use: resources, components and JSON patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
# That in C takes a tenth of the time, where there is one.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def built(folder: Path) -> list[Manifest]:
    """Returns the manifests of a kustomization; fails when it names what is not there."""
    content = yaml.load((folder / "kustomization.yaml").read_text(), _LOADER)
    assert set(content) <= {
        *("apiVersion", "kind", "namespace", "resources", "components", "images", "patches"),
    }, f"{folder} uses more of kustomize than is read here"
    found: list[Manifest] = []
    for name in content.get("resources", ()):
        path = folder / name
        # Kustomize reads files of the folder alone; others come as folders.
        assert path.is_dir() or path.resolve().is_relative_to(folder.resolve()), path
        found += built(path) if path.is_dir() else _documents(path)
    for name in content.get("components", ()):
        component = yaml.load((folder / name / "kustomization.yaml").read_text(), _LOADER)
        assert component["kind"] == "Component"
        for each in component["resources"]:
            found += _documents(folder / name / each)
        _patch(found, component["patches"])
    _patch(found, content.get("patches", ()))
    images = {image["name"]: f"{image['newName']}:{image['newTag']}"
              for image in content.get("images", ())}  # fmt: skip
    for manifest in found:
        _place_images(manifest, images)
    return found


def _documents(path: Path) -> list[Manifest]:
    return [each for each in yaml.load_all(path.read_text(), _LOADER) if each]


def _patch(manifests: list[Manifest], patches: Any) -> None:
    for patch in patches:
        wanted = patch["target"]
        matching = [
            each
            for each in manifests
            if each["kind"] == wanted["kind"]
            and each["metadata"]["name"] == wanted.get("name", each["metadata"]["name"])
        ]
        assert matching, f"nothing is {wanted}"
        for manifest in matching:
            for operation in yaml.safe_load(patch["patch"]):
                _apply(manifest, operation)


def _apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One operation of RFC 6902, on a place that exists."""
    *way, last = operation["path"].strip("/").split("/")
    place: Any = manifest
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    match operation["op"]:
        case "add" if last == "-":
            place.append(operation["value"])
        case "replace":
            assert last in place, f"{operation['path']} is not there"
            place[last] = operation["value"]
        case "remove":
            del place[last]
        case other:
            raise AssertionError(f"{other} {operation['path']} is not known here")


def _place_images(node: Any, images: dict[str, str]) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("image"), str):
            node["image"] = images.get(node["image"], node["image"])
        for each in node.values():
            _place_images(each, images)
    elif isinstance(node, list):
        for each in node:
            _place_images(each, images)
