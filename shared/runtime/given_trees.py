"""Trees that were grown elsewhere, as the first part of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.kernel_settings import has_triton
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_parts import fits_kernels
from shared.runtime.round_state import RoundState
from shared.speculation.tree import NO_TOKEN, TreeRows, rows_of_parents
from shared.tokens import TreeShape


def read_trees(
    trees: Tensor, state: RoundState, batches: RoundBatches, vocab_size: int
) -> RoundTree:
    """Returns the trees of the slots of a state, read once.

    Args:
        trees: `[at least S, 2, T]` int64, tokens and parents, see `TreeRows`.
        vocab_size: of the target.
    """
    if has_triton(trees.device) and fits_kernels(batches.shape):
        # Triton is not installed where there is no CUDA.
        from shared.runtime.given_trees_fused import read_trees_fused

        return read_trees_fused(trees, state, batches, vocab_size)
    token_ids, parents = trees[: state.num_slots].clone().unbind(1)
    tree = batches.shape.tree
    rows = mended_rows(token_ids, parents, state.roots, tree, vocab_size=vocab_size)
    return batches.of_trees(state, rows)


def mended_rows(
    token_ids: Tensor, parents: Tensor, roots: Tensor, shape: TreeShape, *, vocab_size: int
) -> TreeRows:
    """Returns trees that others wrote, as trees of a shape: a node that is none is left out.

    A token is in the vocabulary, a parent comes before its children, no node is deeper than the
    shape, and of siblings with one token the first counts. In a chain each row is the parent of the
    next, whatever was written: the target computes chains as runs of tokens.

    Args:
        token_ids, parents: `[S, T]` int64, see `TreeRows`; column 0 is not read.
        roots: `[S]` int64.
    """
    max_depth = shape.num_steps
    rows = torch.arange(token_ids.shape[1], device=token_ids.device)
    before = (rows - 1).clamp_min(0)
    parents = torch.minimum(parents.clamp_min(0), before)
    if shape.topk == 1:
        parents = before.repeat(len(parents), 1)
    ancestors = parents
    for _ in range(max_depth - 1):
        ancestors = parents.gather(1, ancestors)
    is_node = (token_ids >= 0) & (token_ids < vocab_size) & (ancestors == 0)
    same = token_ids.unsqueeze(2) == token_ids.unsqueeze(1)
    same &= parents.unsqueeze(2) == parents.unsqueeze(1)
    same &= is_node.unsqueeze(1) & ((rows < rows.unsqueeze(1)) & (rows > 0))
    tokens = torch.where(is_node & ~same.any(dim=2), token_ids, NO_TOKEN)
    tokens = torch.cat((roots.unsqueeze(1), tokens[:, 1:]), dim=1)
    return rows_of_parents(tokens, parents, max_depth)
