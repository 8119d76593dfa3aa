"""Rounds on the device: with what drafts lend for them, or with what drafts push."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.drafts.attachment import Attachment
from services.target.drafts.feature_feed import FeatureFeed
from services.target.rounds.device_rounds import DeviceRounds
from services.target.rounds.selected_rounds import SelectedRounds
from services.target.verifier import VerificationMode, Verifier
from shared.kv.leases import KvLeases
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RoundFactory:
    """What the target brings to rounds on the device."""

    runner: ModelRunner
    verifier: Verifier
    leases: KvLeases
    features: FeatureFeed

    def rounds_of(self, attachment: Attachment) -> DeviceRounds | None:
        """Returns rounds with the head of a draft; None where it lends none, or where they cannot
        be: they draw by the coupled rule, and the model is whole on one device."""
        source, spec = attachment.rounds, attachment.feature_spec
        if source is None or spec is None or not self._can_be:
            return None
        store = self.features.kept(spec)
        assert store is not None, "the draft attached without its features"
        return DeviceRounds(source, self.runner, self.leases, store, attachment.identity.algorithm)

    def selected_rounds(self, limits: RoundLimits) -> SelectedRounds | None:
        """Returns rounds whose trees remote drafts push; None where they cannot be, as above."""
        if not self._can_be:
            return None
        return SelectedRounds(self.runner, self.leases, limits)

    @property
    def _can_be(self) -> bool:
        is_coupled = self.verifier.mode is VerificationMode.COUPLED
        return is_coupled and self.runner.decoder.group is None
