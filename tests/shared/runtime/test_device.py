"""From names to device and element type."""

from __future__ import annotations

import pytest
import torch

from shared.errors import SettingsError
from shared.model_options import Dtype, device_problems
from shared.runtime.device import device_named, dtype_named, launch_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=is_available: answer)
        assert device_named("auto").type == expected


def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda:1") == CUDA
    assert device_named("cuda") == torch.device("cuda")
    with pytest.raises(
        SettingsError, match=r"--device is cuda:2; the GPUs here are cuda:0 to cuda:1"
    ):
        device_named("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError, match=r"--device is cuda; (this torch|torch finds no)"):
        device_named("cuda")


def test_a_thread_launches_on_the_gpu_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    launch_on(CPU)
    launch_on(torch.device("cuda"))
    launch_on(CUDA)
    assert current == [CUDA]


@pytest.mark.parametrize(
    ("dtype", "saved", "device", "expected"),
    [
        (Dtype.AUTO, torch.float16, CPU, torch.float32),
        (Dtype.AUTO, torch.float16, CUDA, torch.float16),
        (Dtype.AUTO, None, CUDA, torch.bfloat16),
        (Dtype.FLOAT16, torch.bfloat16, CPU, torch.float16),
        (Dtype.BFLOAT16, None, CUDA, torch.bfloat16),
    ],
)
def test_an_element_type_is_the_named_the_saved_or_the_devices(
    dtype: Dtype, saved: torch.dtype | None, device: torch.device, expected: torch.dtype
) -> None:
    assert dtype_named(dtype, saved, device) is expected


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices_have_these_names(name: str) -> None:
    assert device_problems(name) == ()


@pytest.mark.parametrize("name", ["", "tpu", "cudagraph", "cuda:", "cpu:0", "cuda:x"])
def test_other_names_are_refused(name: str) -> None:
    assert device_problems(name) == (f"--device: {name!r} is not auto, cpu, cuda or cuda:N",)
