"""The target in whose process a drafter runs, as far as the drafter's memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.models.decoder import Decoder
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.memory import CacheSize, Shortage, free_memory_bytes


@dataclass(frozen=True, slots=True)
class Host:
    """Objects that a target shares with a drafter in its process.

    Attributes:
        decoder: shares its tensors; None where they are read from the target's folder.
        num_tokens: of the target's cache; None where that is in another process.
        cache: of the target, which takes what the drafter may lack; None likewise.
        round_bytes: of the GPU's memory, what rounds of the target with the drafter's model take.
        vocab_size: of the target; 0 where it is in another process.
    """

    decoder: Decoder | None = None
    num_tokens: int | None = None
    cache: CacheSize | None = None
    round_bytes: int = 0
    vocab_size: int = 0

    def reserved_bytes(
        self, device: torch.device, own_bytes: int, spec: FeatureSpec | None = None
    ) -> int:
        """Returns what a drafter's cache leaves to others: to its own passes, to the features that
        it reads, and to rounds, of what is free beside those at most half.

        Args:
            own_bytes: of its own passes.
            spec: None for a drafter that reads no features.
        """
        taken = own_bytes + (0 if spec is None else self.feature_bytes(spec))
        if not self.round_bytes:
            return taken
        return taken + min(self.round_bytes, max(0, free_memory_bytes(device) - taken) // 2)

    @property
    def most_tokens(self) -> int | None:
        """Tokens beyond which a head's cache is of no use: as many as the target's, and as many
        again for rounds on the device, which get half of the pages."""
        return None if self.num_tokens is None else 2 * self.num_tokens

    def no_memory(self, shortage: Shortage) -> str:
        """Returns that the drafter does not fit, and what to lower."""
        if self.cache is not None:
            return f"the draft does not fit beside its target: {self.cache.advice(shortage)}"
        return (
            f"the draft does not fit its device: {shortage}; lower its --mem-fraction-static or "
            f"--max-running-requests, or the --mem-fraction-static of a target on the same device"
        )

    def feature_bytes(self, spec: FeatureSpec) -> int:
        """Returns the memory that the target will want once it knows of the head: it keeps a row
        for each token of its cache."""
        return (self.num_tokens or 0) * spec.width * spec.dtype.itemsize
