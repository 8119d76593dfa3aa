"""Top-k takes the lowest index on ties."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.speculation.topk import stable_topk

FEW_VALUES = st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 2.0**-149, 1.0, 3.0, math.inf])
ANY_VALUE = st.floats(width=32, allow_nan=False)


@given(st.lists(st.one_of(FEW_VALUES, ANY_VALUE), min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_order_is_by_value_then_index(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    best, indices = stable_topk(torch.tensor(values, dtype=torch.float32), k)
    assert indices.tolist() == expected
    assert best.tolist() == [values[i] for i in expected]


def test_leading_axes_are_independent() -> None:
    values = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    best, indices = stable_topk(values, 3)
    assert torch.equal(best, values.gather(-1, indices))
    assert torch.equal(best, values.topk(3, dim=-1).values)
