"""Makes lanes: with pushed trees, or with a draft's head, in this process or mapped by another."""

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
    CAPTURED_KINDS,
    RoundShapes,
    RoundSource,
    capacities,
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

_MAX_MAPPED = 2
"""Most kinds of mapped heads. Memory and graphs of each stay allocated, because a draft that was
cut off may still write to them."""


@dataclass(slots=True)
class MappedRounds:
    """Rounds with one kind of mapped head, which is in a draft's process on this host, on a GPU of
    its own. Memory, graphs and measured times are kept for the next draft of the kind.

    Attributes:
        store: the features that the head reads; None where it reads none.
        source: the head and its shapes, without pages, which a draft names once it is ready.
        model_id: the model with which the shapes were measured last.
        shapes: set and measured when a draft is ready for the first time.
    """

    head: MappedHead
    store: FeatureStore | None
    source: RoundSource
    model_id: str
    shapes: RoundShapes | None = None

    def open(self, attachment: Attachment) -> None:
        """Has a draft map the memory and prepare for rounds of all sizes."""
        if self.model_id != attachment.identity.model_id and self.shapes is not None:
            self.shapes.forget_costs()
        self.model_id = attachment.identity.model_id

        def send(commands: SequenceOf[MappedCommand]) -> bool:
            return attachment.port.send(DraftMessage(commands=list(commands)))

        sizes = [
            (number, count, kind)
            for number, max_sequences in enumerate(self.source.trees.values())
            for count in reversed(round_sizes(max_sequences))
            for kind in CAPTURED_KINDS
        ]
        prepared = [PrepareMapped(*size, size is sizes[-1]) for size in sizes]
        attachment.end_waits = self.head.open(send, prepared)


@dataclass(slots=True)
class RoundFactory:
    """Builds rounds on the device from the target's parts. Owned by the engine thread.

    Attributes:
        limits: limits of rounds with mapped heads or pushed trees; None where only rounds with a
            head in this process are possible.
        config: the shapes that rounds with a mapped head may have.
        maps_heads: there may be rounds with mapped heads.
    """

    runner: ModelRunner
    verifier: Verifier
    leases: KvLeases
    features: FeatureFeed
    limits: RoundLimits | None
    config: AdaptiveConfig
    maps_heads: bool
    _mapped: list[MappedRounds] = field(default_factory=list)

    def map_head(self, attachment: Attachment) -> None:
        """Begins to open rounds with the head of a draft on this host. The draft reports when it is
        ready, see `DraftExchange.map_head`."""
        offer, limits, base = attachment.mapped_offer, self.limits, attachment.base_shape
        if offer is None or limits is None or not (self.maps_heads and self._is_coupled):
            return
        if base.num_draft_tokens > MAX_TREE_ROWS or base.num_steps > MAX_TREE_DEPTH:
            return
        context = min(offer.max_context_tokens, limits.max_context_tokens)
        shapes: tuple[TreeShape, ...] = (base,)
        if not offer.is_pinned:
            shapes = self.config.round_shapes(base, drafts_ahead=offer.num_outcomes > 0)
        trees = capacities(shapes, limits.max_sequences)
        for tree, most in trees.items():
            trees[tree] = min(most, self.config.most_lanes(tree, base) or most)
        sized = tuple(
            SizedShape(
                RoundShape.of(
                    tree,
                    draft_vocab_size=offer.vocab_size,
                    max_context_tokens=context,
                    num_outcomes=offer.num_outcomes,
                ),
                max_sequences,
            )
            for tree, max_sequences in trees.items()
        )
        kind, store = MappedSource(offer.vocab_size, sized), self._store(attachment)
        try:
            rounds = self._kept(kind, store)
            if rounds is None and len(self._mapped) < _MAX_MAPPED:
                # Place 0 is that of a head in this process.
                head, place = self._head(kind, store), 1 + len(self._mapped)
                source = RoundSource(head, (), trees, context, offer.is_pinned, place)
                rounds = MappedRounds(head, store, source, attachment.identity.model_id)
                self._mapped.append(rounds)
        except RingUnavailable as error:
            logger.warning("%s pushes its trees: %s", attachment.identity.worker_id, error)
            return
        if rounds is not None:
            rounds.open(attachment)
        attachment.mapped = rounds

    def head_lanes(self, attachment: Attachment) -> HeadLanes | None:
        """Returns lanes of a draft's head; None where it shares none, or where verification is not
        coupled, as it is in rounds."""
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
            # With recurrent layers, slots that read chunks of a prompt would lack a state each.
            reads_prompts=self.runner.pool.states is None,
        )

    def pushed_lanes(self) -> PushedLanes | None:
        """Returns lanes whose trees remote drafts push; None where verification is not coupled, or
        the model is split over several devices."""
        is_whole = self.runner.decoder.group is None
        if self.limits is None or not (self._is_coupled and is_whole):
            return None
        masks = self.verifier.masks
        return PushedLanes(self.runner, self.limits, self.leases, self.features, masks)

    def _kept(self, kind: MappedSource, store: FeatureStore | None) -> MappedRounds | None:
        """Returns rounds of a kind that no draft uses now; None if there are none."""
        for rounds in self._mapped:
            if rounds.head.source == kind and rounds.store is store and not rounds.head.is_open:
                return rounds
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
