"""Makes lanes: with a draft's head, in this process or mapped from another one, or with pushed
trees."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.attachment import Attachment, DraftMessage
from services.target.drafts.feature_store import FeatureFeed, FeatureStore
from services.target.rounds.head_rounds import HeadLanes
from services.target.rounds.pushed_rounds import PushedLanes
from services.target.rounds.round_shapes import (
    RoundShapes,
    RoundSource,
    capacities,
    prepared_kinds,
    round_sizes,
)
from services.target.verifier import VerificationMode, Verifier
from shared.kv.leases import KvLeases
from shared.runtime.mapped_rounds import (
    MappedCommand,
    MappedHead,
    MappedSource,
    PrepareMapped,
)
from shared.runtime.ring_memory import RingUnavailable
from shared.runtime.round_batches import RoundShape, SizedShape
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner
from shared.runtime.selection_runner import MAX_TREE_DEPTH, MAX_TREE_ROWS
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)

# Rounds whose head is in the process of a draft on this host, on a GPU of its own.

# Their memory and graphs stay: a draft that was cut off may still write.
_MOST_KINDS = 2


def _is_small(tree: TreeShape) -> bool:
    return tree.num_draft_tokens <= MAX_TREE_ROWS and tree.num_steps <= MAX_TREE_DEPTH


@dataclass(slots=True)
class MappedRounds:
    """Rounds with a kind of head. Memory, graphs and times stay for the next draft of the kind.

    Attributes:
        store: the features that the head reads; None where it reads none.
        source: without the pages of a draft that is ready.
        shapes: made, and measured, when a draft was ready for the first time.
    """

    head: MappedHead
    store: FeatureStore | None
    source: RoundSource
    shapes: RoundShapes | None = None

    def open(self, attachment: Attachment) -> None:
        """Has a draft map the memory and prepare for all sizes of rounds."""

        def send(commands: SequenceOf[MappedCommand]) -> bool:
            return attachment.port.send(DraftMessage((), (), (), commands=tuple(commands)))

        sizes = [
            (number, count, kind)
            for number, most in enumerate(self.source.trees.values())
            for count in reversed(round_sizes(most))
            for kind in prepared_kinds()
        ]
        self.head.open(send, [PrepareMapped(*each, each is sizes[-1]) for each in sizes])


@dataclass(slots=True)
class RoundFactory:
    """Builds rounds on the device from the target's parts. Owned by the engine thread.

    Attributes:
        limits: None where no round but those of a head in this process stays on the device.
        config: the shapes that rounds with a mapped head may have.
    """

    runner: ModelRunner
    verifier: Verifier
    leases: KvLeases
    features: FeatureFeed
    limits: RoundLimits | None
    config: AdaptiveConfig
    _mapped: list[MappedRounds] = field(default_factory=list)

    def map_head(self, attachment: Attachment) -> None:
        """Begins to open rounds with the head of a draft on this host; they are there once it is
        ready, see `DraftExchange.map_head`."""
        offer, limits, base = attachment.mapped_offer, self.limits, attachment.base_shape
        if offer is None or limits is None or not self._is_coupled or not _is_small(base):
            return
        context = min(offer.max_context_tokens, limits.max_context_tokens)
        shapes: tuple[TreeShape, ...] = (base,)
        if not offer.is_pinned:
            shapes = self.config.round_shapes(base, drafts_ahead=offer.num_outcomes > 0)
        trees = capacities(shapes, limits.max_sequences)
        sized = tuple(
            SizedShape(
                RoundShape.of(
                    tree,
                    draft_vocab_size=offer.vocab_size,
                    max_context_tokens=context,
                    num_outcomes=offer.num_outcomes,
                ),
                most,
            )
            for tree, most in trees.items()
        )
        kind, store = MappedSource(offer.vocab_size, sized), self._store(attachment)
        try:
            rounds = self._kept(kind, store)
            if rounds is None and len(self._mapped) < _MOST_KINDS:
                head, place = self._head(kind, store), 1 + len(self._mapped)  # an own one's is 0
                source = RoundSource(head, (), trees, context, offer.is_pinned, place)
                rounds = MappedRounds(head, store, source)
                self._mapped.append(rounds)
        except RingUnavailable as error:
            logger.warning("%s pushes its trees: %s", attachment.identity.worker_id, error)
            return
        if rounds is not None:
            rounds.open(attachment)
        attachment.mapped = rounds

    def head_lanes(self, attachment: Attachment) -> HeadLanes | None:
        """Returns lanes of the head of a draft; None where it shares none, or where they cannot
        be: they draw by the coupled rule."""
        source, store = attachment.rounds, self._store(attachment)
        if source is None or not self._is_coupled:
            return None
        assert store is not None or not attachment.reads_features, "it attached without features"
        mapped = attachment.mapped
        shapes = None if mapped is None else mapped.shapes
        if shapes is None:
            shapes = RoundShapes(source, self.runner, None if store is None else store.rows)
        if mapped is not None:
            mapped.shapes = shapes
        return HeadLanes(
            source,
            shapes,
            self.leases,
            self.features,
            store,
            self.verifier.masks,
            algorithm=attachment.identity.algorithm,
            # Chunks in several slots would be lanes without a state of their own.
            reads_prompts=self.runner.pool.states is None,
        )

    def pushed_lanes(self) -> PushedLanes | None:
        """Returns lanes whose trees remote drafts push; None where they cannot be: as above, and
        the model has to be whole on one device."""
        is_whole = self.runner.decoder.group is None
        if self.limits is None or not (self._is_coupled and is_whole):
            return None
        masks = self.verifier.masks
        return PushedLanes(self.runner, self.limits, self.leases, self.features, masks)

    def _kept(self, kind: MappedSource, store: FeatureStore | None) -> MappedRounds | None:
        for each in self._mapped:
            if each.head.source == kind and each.store is store and not each.head.is_open:
                return each
        return None

    def _head(self, kind: MappedSource, store: FeatureStore | None) -> MappedHead:
        return MappedHead(
            kind,
            None if store is None else store.computed,
            None if store is None else store.address,
            device=self.runner.device,
            page_size=self.runner.page_size,
            target_vocab_size=self.runner.decoder.config.vocab_size,
        )

    def _store(self, attachment: Attachment) -> FeatureStore | None:
        """Returns the features that a draft reads; None where it reads none."""
        spec = attachment.feature_spec
        return None if spec is None else self.features.kept(spec)

    @property
    def _is_coupled(self) -> bool:
        return self.verifier.mode is VerificationMode.COUPLED
