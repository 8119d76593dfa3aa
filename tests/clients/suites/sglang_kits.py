"""Collected by pytest: a test class for each of SGLang's kits."""

from __future__ import annotations

import importlib
import inspect
import types
import unittest
from typing import Any

import openai
import requests

from suites.sglang import FIXTURE, KITS
from suites.suite import URL

_Eagle3 = importlib.import_module(FIXTURE).Eagle3Base


class Running(_Eagle3):  # type: ignore[misc, valid-type]
    """What kits of speculative decoding ask with, and their limits; the server runs already."""

    parity_ref_outputs: dict[str, str]
    """Of `SpecParityKit`: what the same server says without speculation."""

    @classmethod
    def setUpClass(cls) -> None:
        cls._tokenizer = None
        cls.parity_ref_outputs = {}
        for prompt in getattr(cls, "parity_prompts", ()):
            sampling = {"temperature": 0, "max_new_tokens": 48}
            body = {"text": prompt, "sampling_params": sampling, "speculation": {"disable": True}}
            answer = requests.post(f"{URL}/generate", json=body).json()
            cls.parity_ref_outputs[prompt] = answer["text"]

    @classmethod
    def tearDownClass(cls) -> None:
        """Leaves the server running."""


def _bases(kit: type) -> tuple[type, ...]:
    if kit.__module__.endswith(".spec_server_kits"):
        return (Running, kit)
    return (kit,) if issubclass(kit, unittest.TestCase) else (kit, unittest.TestCase)


_ATTRIBUTES: dict[str, Any] = {
    "__module__": __name__,
    "api_key": "none",
    "base_url": URL,
    "client": openai.Client(base_url=f"{URL}/v1", api_key="none"),
    "model": "demo",
    "process": types.SimpleNamespace(pid=1, poll=lambda: None),
    # Lengths that fit the demo's context.
    "abort_all_max_new_tokens": 1500,
    "pause_max_new_tokens": 256,
    "pause_ignore_eos": True,
    "running_timeout_max_new_tokens": 64,
}
for _kit in KITS:
    _module = importlib.import_module(f"sglang.test.kits.{_kit}")
    for _name, _class in list(vars(_module).items()):
        _is_own = inspect.isclass(_class) and _class.__module__ == _module.__name__
        if _is_own and any(each.startswith("test") for each in dir(_class)):
            globals()[f"Test{_name}"] = type(f"Test{_name}", _bases(_class), _ATTRIBUTES)
