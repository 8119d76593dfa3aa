"""Collected by pytest: a test class for each of SGLang's kits."""

from __future__ import annotations

import importlib
import inspect
import types
import unittest

import openai

from suites.sglang import KITS
from suites.suite import URL

for _kit in KITS:
    _module = importlib.import_module(f"sglang.test.kits.{_kit}")
    for _name, _class in list(vars(_module).items()):
        _is_own = inspect.isclass(_class) and _class.__module__ == _module.__name__
        if _is_own and any(each.startswith("test") for each in dir(_class)):
            _bases = (
                (_class,) if issubclass(_class, unittest.TestCase) else (_class, unittest.TestCase)
            )
            globals()[f"Test{_name}"] = type(
                f"Test{_name}",
                _bases,
                {
                    "__module__": __name__,
                    "api_key": "none",
                    "base_url": URL,
                    "client": openai.Client(base_url=f"{URL}/v1", api_key="none"),
                    "model": "demo",
                    "process": types.SimpleNamespace(pid=1, poll=lambda: None),
                    # Lengths that fit the demo's context.
                    "abort_all_max_new_tokens": 1500,
                    "pause_max_new_tokens": 256,
                    "running_timeout_max_new_tokens": 64,
                },
            )
