"""A language model in the token ids of another: the tensors at both ends, made anew on load.

Everything outside the draft model stays in the target's ids. The embedding becomes a table with a
row for each of the target's tokens. The lm_head keeps the rows of the tokens that both have, like
that of a head with a vocabulary of its own. The noise of the coupled rule is keyed by the target's
ids, so the draft agrees with the target as often as one of the same family that knows these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from shared.models.config import ModelConfig
from shared.vocabulary_map import VocabularyMap


def in_other_vocabulary(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    vocabulary: VocabularyMap,
    *,
    vocab_size: int = 0,
    group: TensorGroup | None = None,
) -> ModelConfig:
    """Replaces `embedding` and `lm_head`, which are two tensors from now on, and adds `token_map`.

    Args:
        tensors: named by `decoder_parts`.
        vocab_size: least number of rows of the embedding; a target may have more ids than its
            tokenizer has tokens.
        group: processes that share the model; all of them call this at the same time.

    Returns:
        The config with the target's vocabulary.
    """
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    vocabulary = vocabulary.within(config.vocab_size)
    embedding = tensors.pop("embedding")
    lm_head = embedding if config.tie_word_embeddings else tensors.pop("lm_head")
    if group is not None:
        embedding, lm_head = group.stacked(embedding), group.stacked(lm_head)
    # Parts are equal: ids without a token are added to the one, and the last tokens, which are
    # rare, left out of the other.
    num_rows = -(-max(vocab_size, len(vocabulary.pieces)) // size)
    num_shared = len(vocabulary.target_ids) // size
    own = vocabulary.pieces[rank * num_rows : (rank + 1) * num_rows]
    tensors["embedding"] = _table(embedding, own, num_rows)
    rows = vocabulary.draft_ids[rank * num_shared : (rank + 1) * num_shared]
    tensors["lm_head"] = lm_head.index_select(0, _ids(rows, lm_head.device))
    tensors["token_map"] = _ids(vocabulary.target_ids[: num_shared * size], lm_head.device)
    return replace(config, vocab_size=num_rows * size, tie_word_embeddings=False)


def with_ids(tensors: dict[str, Tensor], config: ModelConfig, vocab_size: int) -> ModelConfig:
    """Gives a model as many ids as another of the same tokenizer has: models of one family fill
    their tables up to different sizes. Ids that are new are read as zeros, and not proposed.

    Arguments and result are those of `in_other_vocabulary`.
    """
    num_known = min(config.vocab_size, vocab_size)
    table, lm_head = tensors["embedding"], tensors.get("lm_head")
    if vocab_size > num_known:
        table = table.new_zeros(vocab_size, table.shape[1])
        table[:num_known] = tensors["embedding"]
        tensors["token_map"] = torch.arange(num_known, device=table.device)
    tensors["embedding"] = table[:vocab_size]
    tensors["lm_head"] = (table if lm_head is None else lm_head)[:num_known]
    return replace(config, vocab_size=vocab_size, tie_word_embeddings=False)


def _table(embedding: Tensor, pieces: Sequence[tuple[int, ...]], num_rows: int) -> Tensor:
    """Returns `[num_rows, H]`: the row of each token, or what stands for one that the draft lacks.

    A token is one position for both, so one row must do for several pieces. It is that of the last,
    after which the draft expects what comes next. The mean of all rows drafts as well where a third
    or half of the demo target's tokens are left to its draft, and less well where a sixth is.
    """
    table = embedding.new_zeros(num_rows, embedding.shape[1])
    known = [place for place, each in enumerate(pieces) if each]
    last = _ids([pieces[place][-1] for place in known], embedding.device)
    return table.index_copy_(0, _ids(known, embedding.device), embedding.index_select(0, last))


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
