"""The parts of kustomize that the manifests use: resources, components and JSON patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
# The loader in C, if available, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def built(folder: Path) -> list[Manifest]:
    """Returns the manifests of a kustomization; fails if it names something that does not exist."""
    content = yaml.load((folder / "kustomization.yaml").read_text(), _LOADER)
    assert set(content) <= {
        *("apiVersion", "kind", "namespace", "resources", "components", "images", "patches"),
    }, f"{folder} uses more of kustomize than is read here"
    manifests: list[Manifest] = []
    for name in content.get("resources", ()):
        path = folder / name
        # Kustomize reads single files from this folder only; elsewhere it reads folders.
        assert path.is_dir() or path.resolve().is_relative_to(folder.resolve()), path
        manifests += built(path) if path.is_dir() else _documents(path)
    for name in content.get("components", ()):
        component = yaml.load((folder / name / "kustomization.yaml").read_text(), _LOADER)
        assert component["kind"] == "Component"
        for resource in component["resources"]:
            manifests += _documents(folder / name / resource)
        _patch(manifests, component["patches"])
    _patch(manifests, content.get("patches", ()))
    images = {image["name"]: f"{image['newName']}:{image['newTag']}"
              for image in content.get("images", ())}  # fmt: skip
    for manifest in manifests:
        _place_images(manifest, images)
    return manifests


def _documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.load_all(path.read_text(), _LOADER) if document]


def _patch(manifests: list[Manifest], patches: Any) -> None:
    for patch in patches:
        wanted = patch["target"]
        matching = [
            manifest
            for manifest in manifests
            if manifest["kind"] == wanted["kind"]
            and wanted.get("name") in (None, manifest["metadata"]["name"])
        ]
        assert matching, f"nothing is {wanted}"
        for manifest in matching:
            for operation in yaml.safe_load(patch["patch"]):
                _apply(manifest, operation)


def _apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """Applies one operation of RFC 6902, at a path that exists."""
    *parents, last = operation["path"].strip("/").split("/")
    node: Any = manifest
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    match operation["op"]:
        case "add" if last == "-":
            node.append(operation["value"])
        case "replace":
            assert last in node, f"{operation['path']} is not there"
            node[last] = operation["value"]
        case "remove":
            del node[last]
        case unknown:
            raise AssertionError(f"{unknown} {operation['path']} is not known here")


def _place_images(node: Any, images: dict[str, str]) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("image"), str):
            node["image"] = images.get(node["image"], node["image"])
        for child in node.values():
            _place_images(child, images)
    elif isinstance(node, list):
        for child in node:
            _place_images(child, images)
