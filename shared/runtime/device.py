"""Devices and element types by the names in the settings."""

from __future__ import annotations

import torch

from shared.errors import SettingsError
from shared.model_options import Dtype, KvDtype


def device_named(name: str) -> torch.device:
    """Returns the device; `auto` prefers CUDA.

    Raises:
        SettingsError: this process has no such GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError((f"--device is {name}; {_gpus_in_words()}",))
    return device


def device_id(device: torch.device) -> str:
    """Returns the id of a GPU, the same in every process of its host; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gpus_in_words() -> str:
    count = torch.cuda.device_count()
    if count:
        return f"the GPUs here are cuda:0 to cuda:{count - 1}"
    is_built_without = torch.version.cuda is None
    return "this torch is built without CUDA" if is_built_without else "torch finds no GPU here"


def launch_on(device: torch.device) -> None:
    """Makes `device` the one that this thread launches kernels on.

    Triton launches on the thread's current device, wherever the tensors are. Each thread has its
    own current device and starts with the first GPU; a device without a number changes nothing.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


_KV_DTYPES = {
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.FP8_E4M3: torch.float8_e4m3fn,
}


def kv_dtype_named(dtype: KvDtype, model: torch.dtype) -> torch.dtype:
    """Returns the type of keys and values in the cache of a model that computes in `model`."""
    return _KV_DTYPES.get(dtype, model)


def dtype_named(dtype: Dtype, saved: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Returns the type of weights and KV.

    Args:
        saved: type of the checkpoint, if it names one.
    """
    if dtype is not Dtype.AUTO:
        named: torch.dtype = getattr(torch, dtype.value)
        return named
    return torch.float32 if device.type == "cpu" else saved or torch.bfloat16
