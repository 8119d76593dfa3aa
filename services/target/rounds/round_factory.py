"""Makes rounds on the device: with a draft's head, or with pushed trees."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.drafts.attachment import Attachment
from services.target.drafts.feature_store import FeatureFeed, FeatureStore
from services.target.rounds.device_rounds import DeviceRounds, MappedHeads
from services.target.rounds.selected_rounds import SelectedRounds
from services.target.verifier import VerificationMode, Verifier
from shared.kv.leases import KvLeases
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RoundFactory:
    """Builds rounds on the device from the target's parts."""

    runner: ModelRunner
    verifier: Verifier
    leases: KvLeases
    features: FeatureFeed
    mapped_heads: MappedHeads

    def map_head(self, attachment: Attachment) -> None:
        """Begins to open rounds with the head of a draft on this host; they are there once it is
        ready, see `DraftExchange.map_head`."""
        if self._is_coupled:
            store = self._store(attachment)
            attachment.mapped = self.mapped_heads.open(attachment, store)

    def rounds_of(self, attachment: Attachment) -> DeviceRounds | None:
        """Returns rounds with the head of a draft; None where it shares none, or where they cannot
        be: they draw by the coupled rule."""
        source, store = attachment.rounds, self._store(attachment)
        if source is None or not self._is_coupled:
            return None
        assert store is not None or not attachment.reads_features, "it attached without features"
        return DeviceRounds(
            source,
            self.runner,
            self.leases,
            store,
            attachment.identity.algorithm,
            self.verifier.masks,
            attachment.mapped,
        )

    def selected_rounds(self, limits: RoundLimits) -> SelectedRounds | None:
        """Returns rounds whose trees remote drafts push; None where they cannot be: as above, and
        the model has to be whole on one device."""
        if not self._is_coupled or self.runner.decoder.group is not None:
            return None
        return SelectedRounds(self.runner, self.leases, limits, self.verifier.masks)

    def _store(self, attachment: Attachment) -> FeatureStore | None:
        """Returns the features that a draft reads; None where it reads none."""
        spec = attachment.feature_spec
        return None if spec is None else self.features.kept(spec)

    @property
    def _is_coupled(self) -> bool:
        return self.verifier.mode is VerificationMode.COUPLED
