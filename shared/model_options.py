"""Options for loading and running a model, as in the settings. No torch, because settings are read
without it."""

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
"""Our names of element types, by their names in other servers."""

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
"""Our attention backends, by SGLang's names; a backend that we do not have is `auto`."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class Dtype(enum.Enum):
    """Element type of weights and KV; `auto` is the checkpoint's on a GPU, float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantisation(enum.Enum):
    """The format of the weight matrices of a model's layers; products are in the model's dtype.

    Each channel (output of a matrix) has a scale; int8 has equal steps, fp8 is e4m3. Matrices that
    a checkpoint has in the same 8-bit format keep its values and scales. With `unquant`, 8-bit
    matrices stay as they are if the device can multiply them, and are widened otherwise.
    """

    UNQUANT = "unquant"
    INT8 = "int8"
    FP8 = "fp8"


class KvDtype(enum.Enum):
    """Element type of a KV cache; `auto` is the model's. fp8 has a scale per head."""

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
    """Options of a loader in addition to dtype and device.

    Attributes:
        quantises_lm_head: whether `quantisation` applies to the model's own lm_head, too. That of a
            target ranks the tokens and keeps its type.
    """

    load_format: LoadFormat = LoadFormat.AUTO
    quantisation: Quantisation = Quantisation.UNQUANT
    quantises_lm_head: bool = False
    attention_backend: AttentionBackend = AttentionBackend.AUTO

    @property
    def lm_head_quantisation(self) -> Quantisation:
        return self.quantisation if self.quantises_lm_head else Quantisation.UNQUANT


def device_problems(name: str) -> tuple[str, ...]:
    """Returns the problem with the value of `--device`, if there is one."""
    if _DEVICE.fullmatch(name):
        return ()
    return (f"--device: {name!r} is not auto, cpu, cuda or cuda:N",)
