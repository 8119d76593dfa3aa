"""From the names in settings to a device and an element type."""

from __future__ import annotations

import torch

from shared.model_options import Dtype, KvDtype


def device_named(name: str) -> torch.device:
    """Returns the device; `auto` prefers CUDA."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


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
        saved: what the checkpoint was saved in, if it says so.
    """
    if dtype is not Dtype.AUTO:
        named: torch.dtype = getattr(torch, dtype.value)
        return named
    return torch.float32 if device.type == "cpu" else saved or torch.bfloat16
