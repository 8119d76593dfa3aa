"""The drafting algorithms of a worker."""

from __future__ import annotations

import enum


class Algorithm(enum.Enum):
    """Values of `--speculative-algorithm`; NEXTN is another name of EAGLE."""

    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    EAGLE = "EAGLE"
    NEXTN = "NEXTN"
    EAGLE3 = "EAGLE3"
    MTP = "MTP"
    DFLASH = "DFLASH"

    @property
    def reads_features(self) -> bool:
        """Whether the drafter is a head on the target's hidden states."""
        return self not in (Algorithm.STANDALONE, Algorithm.NGRAM)

    @property
    def has_model(self) -> bool:
        """Whether the drafter has weights and needs torch."""
        return self is not Algorithm.NGRAM

    @property
    def takes_token_map(self) -> bool:
        """Whether `--speculative-token-map` is accepted; EAGLE3 heads ignore it, with a warning."""
        return self in (Algorithm.EAGLE, Algorithm.NEXTN, Algorithm.EAGLE3)

    @property
    def takes_cuda_graphs(self) -> bool:
        """Whether the drafter's forwards can be captured as CUDA graphs."""
        return self not in (Algorithm.NGRAM, Algorithm.DFLASH)
