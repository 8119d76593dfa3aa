"""One forward pass over a whole text, with its own pages: the oracle for engines and drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner, RunnerOutput

_PAGE_SIZE = 4


def plain_forward(
    decoder: Decoder,
    token_ids: Sequence[int],
    logit_rows: Sequence[int],
    capture_layers: tuple[int, ...] = (),
) -> RunnerOutput:
    """Returns the decoder's output for `token_ids`, in float32.

    Args:
        logit_rows: positions to return logits of.
    """
    num_pages = len(token_ids) // _PAGE_SIZE + 2
    pool = KvPool(decoder.kv_layout(_PAGE_SIZE, torch.float32), num_pages, decoder.device)
    rows = SequenceRows.causal(token_ids, 0, range(1, num_pages), logit_rows)
    batch = build_batch([rows], page_size=_PAGE_SIZE, device=decoder.device)
    return ModelRunner(decoder, pool).run(batch, capture_layers=capture_layers)
