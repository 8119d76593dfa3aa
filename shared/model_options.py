"""Options for loading and running a model, as settings name them. Free of torch: settings are read
without."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from types import MappingProxyType

DTYPE_SYNONYMS = MappingProxyType(
    {
        "bf16": "bfloat16",
        "half": "float16",
        "fp16": "float16",
        "float": "float32",
        "fp32": "float32",
    }
)
"""Names of element types in other servers, with ours."""

BACKEND_SYNONYMS = MappingProxyType(
    {
        "torch_native": "torch",
        **dict.fromkeys(
            (
                *("fa3", "fa4", "flashinfer", "flashmla", "flash_attn", "cutlass_mla", "aiter"),
                *("trtllm_mha", "trtllm_mla", "dual_chunk_flash_attn", "nsa", "flex_attention"),
            ),
            "auto",
        ),
    }
)
"""Names of SGLang's attention backends; those whose kernels are not here stand for `auto`."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class Dtype(enum.Enum):
    """Element type of weights and KV; `auto` is the checkpoint's on a GPU, float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantisation(enum.Enum):
    """In what the matrices of a model's layers are held; products are in the model's dtype.

    A channel, that is an output of a matrix, has a scale of its own: int8 in equal steps, fp8 as
    e4m3. Matrices that a checkpoint has in these 8 bits keep its numbers and scales. `unquant`
    keeps those in any 8 bits that the device multiplies, and widens them elsewhere.
    """

    UNQUANT = "unquant"
    INT8 = "int8"
    FP8 = "fp8"


class KvDtype(enum.Enum):
    """Element type of a KV cache; `auto` is the model's. fp8 has a factor a head."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"


class LoadFormat(enum.Enum):
    """Format of the weight files to read; `auto` prefers safetensors."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    PT = "pt"


class AttentionBackend(enum.Enum):
    """The implementation of attention; `auto` is Triton on CUDA and plain torch elsewhere."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of a loader beside dtype and device.

    Attributes:
        is_deterministic: a decoder's products keep a row's bits for every number of rows.
    """

    load_format: LoadFormat = LoadFormat.AUTO
    quantisation: Quantisation = Quantisation.UNQUANT
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    is_deterministic: bool = False


def device_problems(name: str) -> tuple[str, ...]:
    """Returns what is wrong with the value of `--device`, if anything."""
    if _DEVICE.fullmatch(name):
        return ()
    return (f"--device: {name!r} is not auto, cpu, cuda or cuda:N",)
