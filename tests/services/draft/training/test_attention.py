"""Attention of the training-time test: compiled, and over many steps."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from services.draft.training.modules import KeysValues, fused_unrolled, unrolled

NUM_STEPS = 11


@pytest.mark.parametrize(("asked", "fused"), [(NUM_STEPS, NUM_STEPS), (1, 8)])
def test_every_depth_that_was_asked_for_is_compiled(
    monkeypatch: pytest.MonkeyPatch, asked: int, fused: int
) -> None:
    counter = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_one = torch.compile
        monkeypatch.setattr(torch, "compile", lambda of: compile_one(of, backend=counter))
        torch._dynamo.reset()
        attend = fused_unrolled(asked)
        for depth in range(1, NUM_STEPS + 1):
            queries, steps = _case(depth)
            assert torch.equal(attend(queries, steps), unrolled(queries, steps))
    assert counter.frame_count == fused


def _case(depth: int) -> tuple[torch.Tensor, list[KeysValues]]:
    generator = torch.Generator().manual_seed(depth)

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 6, 8, generator=generator)

    return rows(4), [(rows(1), rows(1)) for _ in range(depth)]
