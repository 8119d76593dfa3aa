"""Drafts with their own model and pages."""

from __future__ import annotations

import torch

from services.draft.drafters.standalone import StandaloneDrafter
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_model import DecoderModel
from tests.helpers.drafting import plain_grower
from tests.helpers.engines import PAGE_SIZE


def standalone(
    decoder: Decoder,
    num_pages: int = 300,
    *,
    max_context_tokens: int = 200,
    generator: torch.Generator | None = None,
    drafter: type[StandaloneDrafter] = StandaloneDrafter,
) -> StandaloneDrafter:
    """Returns a drafter on the decoder's device."""
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), num_pages, decoder.device)
    return drafter(
        ModelRunner(decoder, pool),
        KvLeases(num_pages, PAGE_SIZE),
        plain_grower(DecoderModel(decoder, pool), max_context_tokens),
        max_context_tokens=max_context_tokens,
        generator=generator,
    )
