"""The drafts that are attached now, and the algorithms that ever were. No torch."""

from __future__ import annotations

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.attachment import Attachment, DraftMessage
from services.target.drafts.draft_policy import ALWAYS, DraftPolicy
from shared.errors import InvalidArgument


class DraftRegistry:
    """Attached drafts by their attachment id. Owned by the engine thread.

    Args:
        config: trees to choose from; None leaves a draft its own.
        always_up_to: sequences that want trees of every draft, whatever they bring.

    Attributes:
        algorithms: of the live drafts, sorted, each once. Replaced, never changed, so that other
            threads may read it.
        known_algorithms: of every draft that ever attached.
    """

    def __init__(self, config: AdaptiveConfig | None = None, *, always_up_to: int = ALWAYS) -> None:
        self._config = config
        self._always_up_to = always_up_to
        self.algorithms: tuple[str, ...] = ()
        self.known_algorithms: set[str] = set()
        self._attachments: dict[str, Attachment] = {}

    @property
    def live(self) -> tuple[Attachment, ...]:
        """Attachments, oldest first."""
        return tuple(self._attachments.values())

    @property
    def are_some_silent(self) -> bool:
        """Whether there are several, and some of them have not answered lately."""
        drafts = self._attachments.values()
        return len(drafts) > 1 and any(each.timeout.is_cold for each in drafts)

    @property
    def policies(self) -> tuple[DraftPolicy, ...]:
        """The policies of the kinds of drafts that are attached."""
        return tuple({each.kind: each.policy for each in self._attachments.values()}.values())

    def get(self, attachment_id: str) -> Attachment | None:
        """Returns a draft; None when it has left."""
        return self._attachments.get(attachment_id)

    def add(self, attachment: Attachment) -> None:
        """A draft attached."""
        known = next((each for each in self.live if each.kind == attachment.kind), None)
        if known is None:
            attachment.policy = DraftPolicy(
                attachment.base_shape, self._config, always_up_to=self._always_up_to
            )
        else:
            attachment.policy = known.policy
            attachment.policy.drafts_changed()
        self._attachments[attachment.identity.attachment_id] = attachment
        self.known_algorithms.add(attachment.identity.algorithm)
        self._publish_algorithms()

    def remove(self, attachment_id: str) -> Attachment | None:
        """Takes a draft out and returns it; None when it had left before."""
        attachment = self._attachments.pop(attachment_id, None)
        self._publish_algorithms()
        return attachment

    def check_algorithm(self, algorithm: str | None) -> None:
        """A draft that left may come back, so its algorithm stays good.

        Raises:
            InvalidArgument: no draft of the algorithm ever attached.
        """
        if algorithm is None or algorithm in self.known_algorithms:
            return
        known = ", ".join(sorted(self.known_algorithms)) or "no draft at all"
        message = f"no draft of algorithm {algorithm!r} ever attached; there was {known}"
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)

    def take_messages(self) -> list[tuple[Attachment, DraftMessage]]:
        """Empties every outbox: one message a draft."""
        messages: list[tuple[Attachment, DraftMessage]] = []
        for attachment in self._attachments.values():
            message = attachment.take_message()
            if message is not None:
                messages.append((attachment, message))
        return messages

    def _publish_algorithms(self) -> None:
        self.algorithms = tuple(
            sorted({each.identity.algorithm for each in self._attachments.values()})
        )
