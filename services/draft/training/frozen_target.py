"""The frozen target model of a head, which may be any decoder that transformers can load, and the
training texts that it generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from services.draft.training.documents import Documents
from services.draft.training.head_shape import Algorithm, HeadShape, default_feature_layers
from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint
from shared.models.decoder_weights import LM_HEAD_KEY
from shared.models.heads.block_size import MAX_BLOCK_SIZE
from shared.models.heads.target_tensors import EMBEDDING_KEY
from shared.models.scaled_weights import QUANTIZATION_CONFIG


@dataclass(frozen=True, slots=True, eq=False)
class TargetRows:
    """The target's outputs for windows of tokens.

    Attributes:
        token_ids: `[B, N]` int64.
        features: `[B, N, W]`, the layers that a head reads, concatenated.
        states: `[B, N, H]`, after the final norm; the input of the target's lm_head.
    """

    token_ids: Tensor
    features: Tensor
    states: Tensor


class FrozenTarget:
    """A causal language model whose hidden states can be read.

    Its decoder must have `layers` and `norm`, as Llama, Qwen and Mistral have.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self._decoder = model.get_decoder()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.lm_head: Tensor = model.get_output_embeddings().weight

    @classmethod
    def load(cls, folder: Path, *, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Raises: CheckpointError if transformers cannot load the folder, or the decoder has
        no `layers` or no `norm`."""
        try:
            model: Any = load_causal_model(folder, dtype)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        decoder = model.get_decoder()
        for part in ("layers", "norm"):
            if not hasattr(decoder, part):
                raise CheckpointError(f"{folder}: {type(decoder).__name__} has no {part}")
        return cls(model.to(device))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_layers(self) -> int:
        return len(self._decoder.layers)

    @property
    def final_norm(self) -> Tensor:
        """Weight `[H]` of the norm before the lm_head."""
        weight: Tensor = self._decoder.norm.weight
        return weight

    def head_shape(self, algorithm: Algorithm, **sizes: Any) -> HeadShape:
        """Returns the shape of a head for this target.

        Args:
            sizes: fields of `HeadShape` that are chosen; None is the target's size.

        Raises:
            CheckpointError: the sizes do not fit together.
        """
        config = self.model.config
        given = {name: size for name, size in sizes.items() if size is not None}
        num_heads = given.get("num_heads", config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        own: dict[str, Any] = {
            "algorithm": algorithm,
            "hidden_size": config.hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": head_dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": None,
            "num_layers": 5 if algorithm is Algorithm.DFLASH else 1,
            "num_target_layers": self.num_layers,
            "feature_layers": default_feature_layers(algorithm, self.num_layers),
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": _rope_theta(config),
            "max_position_embeddings": config.max_position_embeddings,
            "block_size": 8,
        }
        shape = HeadShape(**own | given)
        _check(shape)
        return shape

    @torch.no_grad()
    def read(self, token_ids: Tensor, layers: Sequence[int]) -> TargetRows:
        """Runs the target over windows `[B, N]`; `layers` are the features, see `HeadShape`."""
        with self._captured(layers) as streams:
            output = self._decoder(input_ids=token_ids, use_cache=False)
            states = output.last_hidden_state
            streams[self.num_layers + 1] = states
        features = torch.cat([streams[layer] for layer in layers], dim=-1)
        return TargetRows(token_ids, features, states)

    def logits(self, states: Tensor) -> Tensor:
        """Returns the scores `[..., V]` of states `[..., H]` after the final norm."""
        return F.linear(states, self.lm_head)

    @contextmanager
    def _captured(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Captures the inputs of the modules `layers`, by layer, while the block runs."""
        streams: dict[int, Tensor] = {}
        modules: list[nn.Module] = [*self._decoder.layers, self._decoder.norm]
        hooks = [
            modules[layer].register_forward_pre_hook(
                _capture_hook(streams, layer), with_kwargs=True
            )
            for layer in layers
            if layer <= self.num_layers
        ]
        try:
            yield streams
        finally:
            for hook in hooks:
                hook.remove()


def _capture_hook(streams: dict[int, Tensor], layer: int) -> Any:
    def keep(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        streams[layer] = inputs[0] if inputs else named["hidden_states"]

    return keep


def _rope_theta(config: Any) -> float:
    """Reads transformers 5's spelling, then the older one. RoPE scaling is ignored: it is the
    target's, and a head reads long contexts through the target's features."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)
    return float(theta)


def _check(shape: HeadShape) -> None:
    n = shape.num_target_layers
    outside = [layer for layer in shape.feature_layers if not 0 <= layer <= n + 1]
    if outside:
        raise CheckpointError(f"feature layer {outside[0]} is not in [0, {n + 1}]")
    if shape.algorithm is Algorithm.DFLASH and n in shape.feature_layers:
        raise CheckpointError(f"DFLASH names outputs of layers; {n}, before the norm, has no name")
    if shape.num_heads % shape.num_kv_heads:
        raise CheckpointError(
            f"{shape.num_heads} heads are not a multiple of {shape.num_kv_heads} KV heads"
        )
    if (shape.draft_vocab_size or 0) > shape.vocab_size:
        raise CheckpointError(
            f"a draft vocabulary of {shape.draft_vocab_size} is larger than the target's "
            f"{shape.vocab_size}"
        )
    is_block = shape.algorithm is Algorithm.DFLASH
    if is_block and not 2 <= shape.block_size <= MAX_BLOCK_SIZE:
        raise CheckpointError(
            f"block_size is {shape.block_size}; it must be in [2, {MAX_BLOCK_SIZE}]"
        )
    if not is_block and shape.num_layers != 1:
        raise CheckpointError(
            f"num_layers is {shape.num_layers}; heads of {shape.algorithm.value} are trained with 1"
        )
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        raise CheckpointError(
            f"mask_token_id is {shape.mask_token_id}; it must be in [0, {shape.vocab_size})"
        )


def load_causal_model(folder: Path, dtype: torch.dtype) -> Any:
    """Returns a causal language model of transformers on the CPU, in `dtype`. Weights in 8 bits are
    read by this project's code.

    Raises:
        OSError, ValueError: transformers cannot load the folder.
        CheckpointError: 8-bit weights cannot be read, or do not fit the config.
    """
    config: Any = AutoConfig.from_pretrained(folder)
    if getattr(config, QUANTIZATION_CONFIG, None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    delattr(config, QUANTIZATION_CONFIG)
    checkpoint = Checkpoint.open(folder)
    weights = {key: checkpoint.read(key) for key in checkpoint.files}
    if config.tie_word_embeddings:
        weights[LM_HEAD_KEY] = weights[EMBEDDING_KEY]
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=dtype)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return model.eval()


@torch.inference_mode()
def write_answers(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Returns the generated ids of each prompt, the end token included.

    Args:
        temperature: 0 is greedy; above 0, sampling has no top-k or top-p.
    """
    device, longest = target.device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: answers begin in one column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    output = target.model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        **sampling,
    )
    ends = end_token_ids(target)
    answers: list[list[int]] = output[:, longest:].tolist()
    return [
        next((row[: i + 1] for i, token in enumerate(row) if token in ends), row) for row in answers
    ]


def answered_documents(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    batch_size: int,
    seed: int,
    progress: Callable[[int], object],
) -> Documents:
    """Returns prompts with the target's answers, in random order.

    Args:
        temperatures: of successive batches, repeated.
        progress: called with the number of prompts done since the last call.
    """
    torch.manual_seed(seed)
    by_length = sorted(prompts, key=len)  # little padding within a batch
    rows: list[list[int]] = []
    for number, begin in enumerate(range(0, len(by_length), batch_size)):
        part = by_length[begin : begin + batch_size]
        temperature = temperatures[number % len(temperatures)]
        answers = write_answers(
            target, part, max_new_tokens=max_new_tokens, temperature=temperature
        )
        rows += [[*prompt, *answer] for prompt, answer in zip(part, answers, strict=True)]
        progress(len(part))
    order = np.random.default_rng(seed).permutation(len(rows))
    return Documents.of([rows[index] for index in order])


def end_token_ids(target: FrozenTarget) -> frozenset[int]:
    """Returns the tokens that end an answer; none if the target's config has none."""
    ends = target.model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
