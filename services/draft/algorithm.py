"""The drafters this worker has."""

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
        """Whether it is a head on the target's hidden states."""
        return self not in (Algorithm.STANDALONE, Algorithm.NGRAM)

    @property
    def has_model(self) -> bool:
        """Whether it has weights, and needs torch."""
        return self is not Algorithm.NGRAM

    @property
    def takes_token_map(self) -> bool:
        """Whether `--speculative-token-map` means anything to it."""
        return self in (Algorithm.EAGLE, Algorithm.NEXTN, Algorithm.EAGLE3)

    @property
    def takes_cuda_graphs(self) -> bool:
        """Whether its forwards can be CUDA graphs."""
        return self not in (Algorithm.NGRAM, Algorithm.DFLASH)
