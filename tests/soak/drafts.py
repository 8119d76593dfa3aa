"""The drafts of the soak: good, bad and cheap ones behind a bad network, that come and go."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.ngram import NgramDrafter
from services.target.engine import Engine
from shared.models.decoder import Decoder
from shared.ngram import NgramOptions
from shared.tokens import TreeShape
from tests.helpers.lossy_draft import LossyDraft
from tests.helpers.standalone_drafts import standalone

# Less than eight long sequences need, so that the draft drops some.
NUM_PAGES = 120
CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 9)
AHEAD = 6


class Drafts:
    """Drafts of one engine; each step some say something, and now and then one drops out.

    Args:
        decoders: models to draft with, by name; beside them one draft looks n-grams up.
    """

    def __init__(self, engine: Engine, decoders: Mapping[str, Decoder], seed: int) -> None:
        self._source = random.Random(seed)
        drafters: dict[str, tuple[Drafter, TreeShape, int]] = {
            "ngram": (NgramDrafter(NgramOptions()), TreeShape(4, 4, 8), AHEAD)
        }
        for name, decoder in decoders.items():
            drafters[f"{name}-ahead"] = (standalone(decoder, NUM_PAGES), TREE, AHEAD)
            drafters[f"{name}-chain"] = (standalone(decoder, NUM_PAGES), CHAIN, 0)
        self._attached: list[LossyDraft] = []
        self._away = [
            LossyDraft(
                engine,
                drafter,
                shape,
                outcome_budget,
                seed=seed + i,
                delay=20,
                loss=0.05 * i,
                name=name,
            )
            for i, (name, (drafter, shape, outcome_budget)) in enumerate(drafters.items())
        ]
        for draft in list(self._away):
            self._attach(draft)
        self.num_reconnects = 0

    def step(self) -> None:
        """Lets some of what is under way arrive, and a draft come or go."""
        for draft in self._attached:
            draft.pump()
        if self._attached and self._source.random() < 0.01:
            draft = self._source.choice(self._attached)
            draft.reconnect()
            self.num_reconnects += 1
        fate = self._source.random()
        if fate < 0.01:
            self._drop(self._attached)  # the engine may run ahead of what it reads again
        elif fate < 0.02:
            self._drop(self._attached[:1])
        if self._away and self._source.random() < 0.02:
            self._attach(self._source.choice(self._away))

    def _drop(self, drafts: Sequence[LossyDraft]) -> None:
        for draft in list(drafts):
            self._attached.remove(draft)
            draft.disconnect()
            self._away.append(draft)

    def _attach(self, draft: LossyDraft) -> None:
        self._away.remove(draft)
        draft.attach()
        self._attached.append(draft)
