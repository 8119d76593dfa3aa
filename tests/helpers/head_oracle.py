"""Plain EAGLE and EAGLE-3 heads as an oracle: dense, one sequence, without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from shared.speculation.distributions import gumbel_noise
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.dense_layer import rotated
from tests.helpers.draft_heads import TinyHead

EPS = 1e-5
Values = dict[tuple[int, ...], float]
T = TypeVar("T")
_Rows = tuple[list[int], Tensor, Tensor]


class Paths(Generic[T]):
    """Caches an oracle's result for each path after one text; extends results token by token."""

    def __init__(self) -> None:
        self._text: tuple[tuple[int, ...], Tensor] | None = None
        self._results: dict[tuple[int, ...], T] = {}

    def find(
        self,
        token_ids: Sequence[int],
        features: Tensor,
        path: Sequence[int],
        start: Callable[[], T],
        longer: Callable[[T, int], T],
    ) -> T:
        """Args:
        start: returns the result of the text itself.
        longer: returns the result of a path that is one token longer.
        """
        text = tuple(token_ids), features
        if self._text is None or self._text[0] != text[0] or self._text[1] is not features:
            self._text, self._results = text, {(): start()}
        for end in range(1, len(path) + 1):
            if (prefix := tuple(path[:end])) not in self._results:
                self._results[prefix] = longer(self._results[prefix[:-1]], prefix[-1])
        return self._results[tuple(path)]


class HeadOracle:
    """Computes states and logits of whole sequences from the tensors of a checkpoint."""

    def __init__(
        self,
        head: TinyHead,
        tensors: dict[str, Tensor],
        *,
        target_embedding: Tensor,
        target_lm_head: Tensor,
        token_map: Sequence[int] | None = None,
        feeds_back_norm: bool = False,
        norm_before_residual: bool = False,
    ) -> None:
        self.head, self.tensors = head, tensors
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.lm_head = tensors.get("lm_head.weight", target_lm_head)
        self.token_map = token_map
        self.feeds_back_norm = feeds_back_norm
        self.norm_before_residual = norm_before_residual
        self._paths = Paths[_Rows]()

    def fuse(self, rows: Tensor) -> Tensor:
        """What target and draft together make of the concatenated target layers."""
        if self.head.kind == "EAGLE":
            return rows
        if "input_norm.weight" in self.tensors:
            rows = self._norm(rows, "input_norm.weight")
        if "fc_norm.0.weight" in self.tensors:
            size = self.head.target_hidden_size
            parts = [rows[:, i * size : (i + 1) * size] for i in range(self.head.num_features)]
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            rows = torch.cat(parts, dim=1)
        return rows @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", torch.tensor(0.0))

    def continue_path(
        self, token_ids: Sequence[int], features: Tensor, path: Sequence[int]
    ) -> Tensor:
        """Returns the logits `[V]` after the committed tokens and a path of tree tokens.

        Args:
            token_ids: N committed tokens.
            features: `[N - 1, W]`, of positions 0 … N-2.
        """

        def rows(tokens: list[int], hidden: Tensor) -> _Rows:
            return tokens, hidden, self.states(tokens, hidden)

        def longer(before: _Rows, token: int) -> _Rows:
            # The tree's row reads the state of the row before it.
            tokens, hidden, states = before
            return rows([*tokens, token], torch.cat((hidden, states[-1:])))

        start = partial(rows, list(token_ids[1:]), self.fuse(features))
        _, _, states = self._paths.find(token_ids, features, path, start, longer)
        return self.logits(states[-1:])[0]

    def states(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Returns the recurrent states `[N, H]` of rows (token, hidden state)."""
        embedded = self.embedding[torch.tensor(tokens)]
        if self.head.kind == "EAGLE":
            both = torch.cat((embedded, hidden), dim=1)
            mixed = both @ self.tensors["fc.weight"].T
            mixed = mixed + self.tensors.get("fc.bias", torch.tensor(0.0))
            mixed = mixed + self._attention(mixed, "layers.0.")
            return mixed + self._mlp(mixed, "layers.0.")
        normed = self._norm(hidden, "midlayer.hidden_norm.weight")
        inputs = torch.cat((self._norm(embedded, "midlayer.input_layernorm.weight"), normed), dim=1)
        mixed = (normed if self.norm_before_residual else hidden) + self._attention(
            inputs, "midlayer."
        )
        state = mixed + self._mlp(mixed, "midlayer.")
        return self._norm(state, "norm.weight") if self.feeds_back_norm else state

    def logits(self, states: Tensor) -> Tensor:
        """Returns `[N, V]`, -inf for tokens the head does not have."""
        if self.head.kind == "EAGLE3" and not self.feeds_back_norm:
            states = self._norm(states, "norm.weight")
        if self.head.kind == "EAGLE" and self.token_map is None:
            return states @ self.lm_head.T
        logits = torch.full((len(states), self.head.vocab_size), -math.inf)
        known = torch.tensor(self.known_tokens())
        rows = known if self.head.kind == "EAGLE" else torch.arange(len(known))
        logits[:, known] = states @ self.lm_head[rows].T
        return logits

    def known_tokens(self) -> list[int]:
        """Returns the target's id of each draft id."""
        if self.token_map is not None:
            return list(self.token_map)
        if "d2t" not in self.tensors:
            return list(range(self.head.vocab_size))
        return [index + offset for index, offset in enumerate(self.tensors["d2t"].tolist())]

    def _norm(self, rows: Tensor, key: str) -> Tensor:
        return rows / (rows.pow(2).mean(1, keepdim=True) + EPS).sqrt() * self.tensors[key]

    def _mlp(self, rows: Tensor, layer: str) -> Tensor:
        rows = self._norm(rows, f"{layer}post_attention_layernorm.weight")
        gate = rows @ self.tensors[f"{layer}mlp.gate_proj.weight"].T
        up = rows @ self.tensors[f"{layer}mlp.up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ self.tensors[f"{layer}mlp.down_proj.weight"].T

    def _attention(self, rows: Tensor, layer: str) -> Tensor:
        head = self.head
        q, k, v = (
            (rows @ self.tensors[f"{layer}self_attn.{name}_proj.weight"].T).view(
                len(rows), -1, head.head_dim
            )
            for name in "qkv"
        )
        positions = torch.arange(len(rows))
        q, k = rotated(q, positions), rotated(k, positions)
        group = head.num_heads // head.num_kv_heads
        outputs = []
        for query_head in range(head.num_heads):
            keys, values = k[:, query_head // group], v[:, query_head // group]
            scores = q[:, query_head] @ keys.T / math.sqrt(head.head_dim)
            hidden_ones = torch.ones_like(scores, dtype=torch.bool).triu(1)
            outputs.append(scores.masked_fill(hidden_ones, -math.inf).softmax(1) @ values)
        return torch.cat(outputs, dim=1) @ self.tensors[f"{layer}self_attn.o_proj.weight"].T


class PathOracle(Protocol):
    """Scores the tokens after any path."""

    def known_tokens(self) -> list[int]: ...

    def continue_path(
        self, token_ids: Sequence[int], features: Tensor, path: Sequence[int]
    ) -> Tensor: ...


@dataclass(frozen=True)
class Behind:
    """An oracle that continues tokens of which the last `num_supposed` are not committed yet: these
    are the beginning of the path."""

    oracle: PathOracle
    num_supposed: int

    def known_tokens(self) -> list[int]:
        return self.oracle.known_tokens()

    def continue_path(
        self, token_ids: Sequence[int], features: Tensor, path: Sequence[int]
    ) -> Tensor:
        num_committed = len(token_ids) - self.num_supposed
        full_path = (*token_ids[num_committed:], *path)
        return self.oracle.continue_path(token_ids[:num_committed], features, full_path)


def best_paths(
    oracle: PathOracle,
    token_ids: Sequence[int],
    features: Tensor,
    sampling: SamplingParams,
    shape: TreeShape,
    *,
    num_before: int = 0,
) -> Values:
    """Returns the paths that a tree keeps, with their values; computes all logits from scratch.

    Args:
        token_ids: N committed tokens of the window.
        features: `[N - 1, W]`.
        num_before: committed tokens before the window; positions of the noise include them.
    """
    num_tokens, topk = len(token_ids), min(shape.topk, len(oracle.known_tokens()))

    def next_log_probs(path: tuple[int, ...]) -> list[float]:
        logits = oracle.continue_path(token_ids, features, path)
        if not sampling.is_greedy:
            position = torch.tensor([num_before + num_tokens + len(path)])
            logits = logits + gumbel_noise(torch.tensor([sampling.seed]), position, len(logits))[0]
        return list(logits.log_softmax(dim=0).tolist())

    values: Values = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(min(shape.num_steps, shape.max_node_count)):
        children: Values = {}
        for path in frontier:
            log_probs = next_log_probs(path)
            best = sorted(range(len(log_probs)), key=lambda token: -log_probs[token])[:topk]
            base = values.get(path, 0.0)
            children.update({(*path, token): base + log_probs[token] for token in best})
        values.update(children)
        frontier = sorted(children, key=lambda path: -children[path])[:topk]
    kept = sorted(values, key=lambda path: -values[path])[: shape.max_node_count]
    return {path: values[path] for path in kept if values[path] > -math.inf}


def path_values(tree: TokenTree) -> Values:
    """Returns each node's path with the sum of log probabilities along it."""
    return {
        tuple(tree.token_ids[n] for n in tree.path(node)): sum(
            tree.log_probs[n] for n in tree.path(node)
        )
        for node in range(len(tree))
    }
