"""A sequence that takes part in rounds on the device, or did before the general path took over."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.drafts.feature_store import FeatureStore
from services.target.sequence import Sequence
from shared.kv.leases import KvLeases, OutOfPages
from shared.kv.pages import PagePool
from shared.runtime.round_sequences import Newcomer


@dataclass(slots=True)
class Guest:
    """The state that rounds keep of a running sequence.

    Attributes:
        head_pages: the head's, in logical order.
        num_head_rows: rows of the head that are computed.
    """

    sequence: Sequence
    head_pages: list[int] = field(default_factory=list)
    num_head_rows: int = 0

    @property
    def newcomer(self) -> Newcomer:
        """What places it; the head lacks one row at least, from which a tree starts."""
        num_head_rows = min(self.num_head_rows, len(self.sequence.token_ids) - 2)
        return newcomer_of(self.sequence, self.head_pages, num_head_rows)

    def has_features(self, store: FeatureStore, page_size: int) -> bool:
        """Whether the features are there that the head has not read; the sequence takes no part."""
        end = self.sequence.num_computed
        start = max(min(self.num_head_rows, end - 1), 0)
        return store.first_known(self.sequence.open_lease.slots(start, end, page_size)) == 0

    def grow(
        self, num_tokens: int, num_head_rows: int, leases: KvLeases, head_pages: PagePool
    ) -> bool:
        """Makes the pages cover target and head; nobody is preempted for it. False where there are
        not enough."""
        num_missing = -(-num_head_rows // leases.page_size) - len(self.head_pages)
        try:
            leases.grow(self.sequence.open_lease, num_tokens)
            if num_missing > 0:
                self.head_pages += head_pages.allocate(num_missing)
        except OutOfPages:
            return False
        return True


def newcomer_of(
    sequence: Sequence, head_pages: SequenceOf[int] = (), num_head_rows: int = 0
) -> Newcomer:
    """Returns what gives a sequence its lane; without a head there is nothing to say of one."""
    return Newcomer(
        sequence.sequence_id,
        sequence.token_ids,
        sequence.sampling,
        pages=sequence.open_lease.pages,
        head_pages=head_pages,
        num_head_rows=num_head_rows,
        num_computed=sequence.num_computed,
        num_prompt_tokens=sequence.num_prompt_tokens,
        min_length=sequence.num_prompt_tokens + sequence.request.stop.min_output_tokens,
        stop_token_ids=sequence.stop_token_ids,
        top_logprobs=sequence.request.top_logprobs,
        logprob_temperature=sequence.request.logprob_temperature,
    )
