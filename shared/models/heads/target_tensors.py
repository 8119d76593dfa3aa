"""The two tensors that a draft head takes from its target: embedding and lm_head."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.pointwise import own_embeddings
from shared.layers.linear import Linear
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.weights import WeightPart, read_weights

EMBEDDING_KEY = DecoderKeys().embedding


class Table(enum.Enum):
    """A tensor that a head may take from its target; the values are those on the wire."""

    EMBEDDING = 1
    LM_HEAD = 2


class TargetTensors:
    """A target's embedding and lm_head, each read only when a head needs it.

    Args:
        read: returns a table `[V, H]`, unpacked, in the head's dtype, on its device.
    """

    def __init__(self, config: ModelConfig, read: Callable[[Table], Tensor]) -> None:
        self.config, self._read = config, read

    @classmethod
    def of_decoder(cls, decoder: Decoder, dtype: torch.dtype) -> TargetTensors:
        """Returns the tensors of a target in this process. If the head's dtype is the target's they
        take no memory of their own, except for a packed lm_head."""
        assert decoder.group is None, "this process has only a part of the tensors"
        return cls(decoder.config, lambda table: _table(decoder, table).to(dtype))

    def embedding(self) -> Tensor:
        """Returns `[V, H]`."""
        return self._read(Table.EMBEDDING)

    def lm_head(self) -> Tensor:
        """Returns `[V, H]`; the embedding itself where the target ties the two."""
        return self.embedding() if self.config.tie_word_embeddings else self._read(Table.LM_HEAD)


class TargetFolder(TargetTensors):
    """A target's embedding and lm_head, read from the target's folder."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises: CheckpointError if the folder has no usable config or weights."""
        super().__init__(ModelConfig.from_folder(folder), self._read_table)
        self._checkpoint = Checkpoint.open(folder)
        self._dtype, self._device = dtype, device
        self._embedding: Tensor | None = None

    def embedding(self) -> Tensor:
        if self._embedding is None:
            self._embedding = super().embedding()
        return self._embedding

    def _read_table(self, table: Table) -> Tensor:
        keys = DecoderKeys.of(self._checkpoint.files)
        key = keys.embedding if table is Table.EMBEDDING else keys.lm_head
        shape = (self.config.vocab_size, self.config.hidden_size)
        tensors = read_weights(
            self._checkpoint,
            [WeightPart(key, shape, key)],
            # A head needs no other tensor of the folder.
            ignored_prefixes=("",),
            dtype=self._dtype,
            device=self._device,
        )
        return tensors[key]


class BorrowedTensors:
    """The tensors that a head copied from its target, to be copied again after a weight update.
    They are found by comparing values, so construct this before either model changes.

    Args:
        target: the target that the head was loaded with.
        token_ids: `[Vd]` int64, the target's tokens that the head scores; None when all.

    Attributes:
        dtype, device: those of the head.
        tables: which tensors are borrowed.
    """

    def __init__(
        self,
        target: TargetTensors,
        embedding: Tensor,
        lm_head: Linear,
        token_ids: Tensor | None = None,
    ) -> None:
        self.config, self._token_ids = target.config, token_ids
        self.dtype, self.device = embedding.dtype, embedding.device
        self._embedding = _if_equal(embedding, target.embedding())
        borrowed = _if_equal(lm_head.dense(), self._scored(target))
        self._head = None if borrowed is None else lm_head
        is_tied = self.config.tie_word_embeddings
        head_table = Table.EMBEDDING if is_tied else Table.LM_HEAD
        tables = {Table.EMBEDDING} if self._embedding is not None else set()
        self.tables = frozenset(tables if self._head is None else {*tables, head_table})

    @torch.inference_mode()
    def follow(self, target: TargetTensors) -> None:
        """Copies the borrowed tensors anew; a tensor in the target's own memory needs no copy."""
        if self._embedding is not None:
            _copy(self._embedding, target.embedding())
        if self._head is not None:
            weight, source = self._head.weight.values, self._scored(target)
            is_packed = weight.layout != torch.strided
            _copy(weight, Linear.of(source).weight.values if is_packed else source)

    def _scored(self, target: TargetTensors) -> Tensor:

        lm_head = target.lm_head()
        return lm_head if self._token_ids is None else lm_head.index_select(0, self._token_ids)


def table_rows(decoder: Decoder, table: Table, start: int, end: int) -> Tensor:
    """Returns rows `start` to `end` of a table; all processes of a group call it together."""
    part = _table(decoder, table)
    if decoder.group is None:
        return part[start:end]
    token_ids = torch.arange(start, end, device=part.device)
    return decoder.group.sum(own_embeddings(token_ids, part, decoder.group.rank * len(part)))


def _table(decoder: Decoder, table: Table) -> Tensor:
    is_embedding = table is Table.EMBEDDING or decoder.config.tie_word_embeddings
    return decoder.embedding if is_embedding else decoder.lm_head.dense()


def _if_equal(own: Tensor, target: Tensor) -> Tensor | None:
    return own if own.shape == target.shape and torch.equal(own, target) else None


def _copy(destination: Tensor, source: Tensor) -> None:
    is_packed = destination.layout != torch.strided
    if is_packed or destination.data_ptr() != source.data_ptr():
        destination.copy_(source)


def target_tensors(
    folder: Path, decoder: Decoder | None, *, dtype: torch.dtype, device: torch.device
) -> TargetTensors:
    """Returns the tensors of `decoder`, or those in the target's folder if another process has the
    decoder.

    Raises:
        CheckpointError: the folder has no usable config or weights.
    """
    if decoder is None:
        return TargetFolder(folder, dtype=dtype, device=device)
    assert decoder.device.type == device.type, f"head on {device}, target on {decoder.device}"
    return TargetTensors.of_decoder(decoder, dtype)
