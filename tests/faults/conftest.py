"""The gateway's fixtures: fake targets, and gateways in front of them."""

from __future__ import annotations

from tests.gateway.conftest import (
    make_gateway,
    model_folder,
    second_target,
    sha256,
    target,
    text,
)

__all__ = ["make_gateway", "model_folder", "second_target", "sha256", "target", "text"]
