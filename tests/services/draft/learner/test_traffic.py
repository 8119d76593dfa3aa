"""What is kept of the traffic, how long, and what is never trained on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from services.draft.events import (
    FeatureRows,
    FeaturesArrived,
    LinkClosed,
    LinkTerms,
    SequencesOpened,
)
from services.draft.learner.traffic import Example, Traffic
from shared.tokens import OpenedSequence, SamplingParams

TERMS = LinkTerms(vocab_size=300, max_nodes=8, max_sequences=1, mirrors_noise=True)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _example(first: int, num_tokens: int = 20) -> Example:
    tokens = tuple(range(first, first + num_tokens))
    return Example(tokens, torch.zeros(num_tokens - 1, 2), 8)


def _opened(link: int, sequence_id: int, num_tokens: int) -> SequencesOpened:
    opening = OpenedSequence(sequence_id, tuple(range(num_tokens)), 3, SamplingParams(), 0)
    return SequencesOpened(link, (opening,))


def _rows(link: int, sequence_id: int, start: int, count: int) -> FeaturesArrived:
    rows = torch.arange(start, start + count).unsqueeze(1).float()
    return FeaturesArrived(link, sequence_id, FeatureRows(start, rows))


def test_an_example_is_there_when_its_last_row_is() -> None:
    traffic = Traffic(held_out_share=0.0)
    link = traffic.open_link(TERMS, lambda output: None)
    traffic.submit(_opened(link, 7, 12))
    traffic.submit(_rows(link, 7, 0, 5))
    assert traffic.recent() == []
    traffic.submit(_rows(link, 7, 5, 6))
    [example] = traffic.recent()
    assert example.token_ids == tuple(range(12))
    assert example.rows.flatten().tolist() == list(range(11))
    assert (example.num_prompt_tokens, example.num_drafted) == (3, 8)


def test_what_a_target_did_not_tell_to_the_end_goes_with_it() -> None:
    traffic = Traffic(held_out_share=0.0)
    link = traffic.open_link(TERMS, lambda output: None)
    traffic.submit(_opened(link, 7, 12))
    assert traffic.num_links == 1
    traffic.submit(LinkClosed(link))
    traffic.close_link(link)
    assert traffic.num_links == 0
    traffic.submit(_rows(link, 7, 0, 11))
    assert traffic.num_examples == 0


def test_no_more_is_kept_than_is_allowed() -> None:
    traffic = Traffic(max_tokens=400, held_out_share=0.2, replay_share=0.25)
    for first in range(200):
        traffic.add(_example(first))
        assert traffic.num_kept_tokens <= 400
    assert traffic.recent()[-1].token_ids[0] >= 190
    assert len(traffic.replayed()) == 5
    assert traffic.num_tokens == 200 * 20


def test_the_replayed_are_a_uniform_sample() -> None:
    """Each quarter of the traffic is about a quarter of the sample, the oldest one included."""
    traffic = Traffic(max_tokens=4_000, held_out_share=0.0, replay_share=0.5)
    for first in range(2_000):
        traffic.add(_example(first))
    quarters = Counter(example.token_ids[0] // 500 for example in traffic.replayed())
    assert quarters.total() == 100
    assert min(quarters[part] for part in range(4)) > 10


def test_nothing_is_kept_longer_than_is_allowed() -> None:
    clock = Clock()
    traffic = Traffic(clock, max_age_s=60.0, held_out_share=0.0)
    link = traffic.open_link(TERMS, lambda output: None)
    traffic.submit(_opened(link, 1, 12))
    traffic.submit(_rows(link, 1, 0, 11))
    clock.now_s += 59.0
    assert len(traffic.recent()) == 1
    clock.now_s += 2.0
    assert traffic.recent() == []
    assert traffic.num_kept_tokens == 0


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_held_out_prompts_are_never_trained_on(share: float) -> None:
    traffic = Traffic(max_tokens=10**6, held_out_share=share)
    for _ in range(2):
        for first in range(500):
            traffic.add(_example(first))
    held_out = {each.token_ids for each in traffic.held_out()}
    trained = {each.token_ids for each in (*traffic.recent(), *traffic.replayed())}
    assert not held_out & trained
    assert abs(len(held_out) / 500 - share) < 0.1


def test_forgetting_leaves_nothing() -> None:
    traffic = Traffic()
    for first in range(100):
        traffic.add(_example(first))
    traffic.add(_example(900), is_old=True)
    traffic.forget()
    assert traffic.num_kept_tokens == 0
    assert [*traffic.recent(), *traffic.replayed(), *traffic.held_out()] == []
