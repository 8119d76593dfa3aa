"""A small mixture of experts with a next-token layer, in plain torch.

Its parameters are saved by the names of ``Glm4MoeForCausalLM``, whose layers it has. All experts
compute all tokens in training: they are narrow, and no token waits for another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from shared.demo.recipe.checkpoint import END_OF_TEXT_ID, TURN_END_ID
from shared.demo.recipe.model import RMSNorm, rotate


@dataclass(frozen=True)
class MixtureShape:
    """Sizes; the first layer is dense, and the next-token layer comes beside ``layers``."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dense: int = 256
    expert: int = 64
    experts: int = 8
    chosen: int = 2
    vocabulary: int = 8192
    positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5


class Attention(nn.Module):
    """Grouped-query attention with normed heads, of which half the dimensions turn."""

    def __init__(self, s: MixtureShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, n, _ = x.shape
        shape = (batch, n, -1, self.s.head_dim)
        q = self.turned(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        k = self.turned(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.s.head_dim // 2
        return torch.cat((rotate(x[..., :half], cos, sin), x[..., half:]), dim=-1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """Sigmoid routing whose choice is corrected, so that experts are used alike, and a shared
    expert. Source: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 and 4.2."""

    correction: Tensor
    counts: Tensor

    def __init__(self, s: MixtureShape) -> None:
        super().__init__()
        self.s = s
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(s.experts, 2 * s.expert, s.hidden))
        self.down = nn.Parameter(torch.empty(s.experts, s.hidden, s.expert))
        self.shared = Mlp(s.hidden, s.expert)
        self.register_buffer("correction", torch.zeros(s.experts))
        self.register_buffer("counts", torch.zeros(s.experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores + self.correction).topk(self.s.chosen, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        with torch.no_grad():
            self.counts += mask.detach().flatten(0, -2).sum(0)
        weights = scores * mask
        weights = (weights / (weights.sum(-1, keepdim=True) + 1e-20)).to(x.dtype)
        gate, up = torch.einsum("btd,end->bten", x, self.gate_up).chunk(2, dim=-1)
        routed = torch.einsum("bten,edn->bted", F.silu(gate) * up, self.down)
        out: Tensor = (routed * weights.unsqueeze(-1)).sum(2) + self.shared(x)
        return out

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Moves the correction towards equal use; returns the share of the busiest expert."""
        share = self.counts / self.counts.sum()
        self.correction += rate * (share.mean() - share).sign()
        self.counts.zero_()
        return float(share.max())


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, s: MixtureShape, *, is_dense: bool) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = Mlp(s.hidden, s.dense) if is_dense else Experts(s)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class NextToken(nn.Module):
    """Reads the state of a position and the embedding of the token after it."""

    def __init__(self, s: MixtureShape) -> None:
        super().__init__()
        self.enorm = RMSNorm(s.hidden, s.eps)
        self.hnorm = RMSNorm(s.hidden, s.eps)
        self.eh_proj = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.block = Layer(s, is_dense=False)
        self.norm = RMSNorm(s.hidden, s.eps)

    def forward(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1)
        out: Tensor = self.norm(self.block(self.eh_proj(joined), cos, sin))
        return out


class Mixture(nn.Module):
    """Decoder with tied embeddings, and its next-token layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: MixtureShape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s, is_dense=i == 0) for i in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)
        self.next_token = NextToken(s)
        turned = s.head_dim // 2
        steps = torch.arange(0, turned, 2).float() / turned
        angles = torch.outer(torch.arange(s.positions).float(), s.theta**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                is_out = name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down"))
                nn.init.normal_(weight, std=0.02 / (2 * s.layers) ** 0.5 if is_out else 0.02)

    def states(self, ids: Tensor) -> Tensor:
        """Ids [batch, n] to normed states [batch, n, hidden]."""
        n = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:n], self.sin[:n])
        out: Tensor = self.norm(x)
        return out

    def next_states(self, ids: Tensor, states: Tensor) -> Tensor:
        """Ids [batch, n] of the tokens behind the positions of ``states`` to the layer's own."""
        n = ids.shape[1]
        out: Tensor = self.next_token(self.embed_tokens(ids), states, self.cos[:n], self.sin[:n])
        return out

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.embed_tokens.weight)

    def mixtures(self) -> list[Experts]:
        """All blocks of experts."""
        return [module for module in self.modules() if isinstance(module, Experts)]


def config(s: MixtureShape) -> dict[str, object]:
    """``config.json`` of a ``Glm4MoeForCausalLM`` of this shape."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": s.hidden,
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.expert,
        "num_hidden_layers": s.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "n_routed_experts": s.experts,
        "num_experts_per_tok": s.chosen,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": s.positions,
        "partial_rotary_factor": 0.5,
        "rope_theta": s.theta,
        "rms_norm_eps": s.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": True,
        "tie_word_embeddings": True,
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def published(model: Mixture) -> dict[str, Tensor]:
    """The weights by the names of a checkpoint."""
    weights = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
    }
    count = model.s.layers
    for index, layer in enumerate([*model.layers, model.next_token.block]):
        for name, weight in _published_layer(layer):
            weights[f"model.layers.{index}.{name}"] = weight
    own = model.next_token
    for name, module in (
        ("enorm", own.enorm),
        ("hnorm", own.hnorm),
        ("eh_proj", own.eh_proj),
        ("shared_head.norm", own.norm),
    ):
        weights[f"model.layers.{count}.{name}.weight"] = module.weight
    return {name: weight.detach() for name, weight in weights.items()}


def _published_layer(layer: nn.Module) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = [
        (n, w) for n, w in layer.named_parameters() if not n.startswith("mlp.")
    ]
    mlp = layer.get_submodule("mlp")
    if not isinstance(mlp, Experts):
        return found + [(f"mlp.{n}", w) for n, w in mlp.named_parameters()]
    found += [(f"mlp.shared_experts.{n}", w) for n, w in mlp.shared.named_parameters()]
    found += [
        ("mlp.gate.weight", mlp.gate.weight),
        ("mlp.gate.e_score_correction_bias", mlp.correction),
    ]
    for index in range(len(mlp.gate_up)):
        gate, up = mlp.gate_up[index].chunk(2)
        for name, weight in (("gate", gate), ("up", up), ("down", mlp.down[index])):
            found.append((f"mlp.experts.{index}.{name}_proj.weight", weight))
    return found


def save(model: Mixture, folder: Path) -> None:
    """Weights in bfloat16, the correction in float32, and the two configs."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to("cpu", torch.float32 if "correction" in name else torch.bfloat16)
        .clone().contiguous()
        for name, weight in published(model).items()
    }  # fmt: skip
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    ends = {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    (folder / "config.json").write_text(json.dumps(config(model.s), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
