"""Computes the device memory that a pass over growing trees takes."""

from __future__ import annotations

from shared.kernels.split_plan import PLAIN_TILE, num_splits
from shared.models.heads.head import DraftHead
from shared.runtime.tree_pass import PassLimits
from shared.tokens import TreeShape


def num_pass_rows(tree: TreeShape, limits: PassLimits) -> int:
    """Returns the rows of the largest forward of a pass: those that are open, or a level's."""
    return limits.max_sequences * max(tree.num_steps + 1, tree.topk)


def head_memory_bytes(head: DraftHead, tree: TreeShape, limits: PassLimits) -> int:
    """Returns about what the largest graph needs beside weights and cache; others share it."""
    attention, size = head.layers[0].attention.shape, head.dtype.itemsize
    num_rows = num_pass_rows(tree, limits)
    features = 2 * limits.max_sequences * (tree.num_steps + 1) * head.feature_spec.width * size
    partial = num_splits(limits.max_context_tokens) * (attention.head_dim + 2)
    # Each sequence fills its last block of rows up.
    num_groups = attention.num_heads // attention.num_kv_heads
    num_kernel_rows = num_rows + limits.max_sequences * max(PLAIN_TILE // num_groups, 1)
    kernels = num_kernel_rows * attention.num_heads * partial * 4
    logits = limits.max_sequences * tree.topk * head.vocabulary.size * (4 + size)
    # Inputs, states and what the layer makes of them, for as long as the pass goes on.
    blocks = tree.num_steps * num_rows * 16 * head.embedding.shape[1] * size
    return features + kernels + logits + blocks
