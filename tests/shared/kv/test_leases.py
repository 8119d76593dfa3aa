"""Pages have one owner each, whatever the order of opening, growing, sharing and closing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.leases import CACHED_PAGE_WEIGHT, KvLease, KvLeases, OutOfPages, PrefixCache

PAGE = 4
ACTIONS = ("open", "extend", "publish", "close", "flush")


def _leases(num_pages: int = 9, *, prefix_cache: bool = True) -> KvLeases:
    return KvLeases(num_pages, PAGE, prefix_cache=prefix_cache)


def _run(leases: KvLeases, tokens: list[int]) -> KvLease:
    lease = leases.open(tokens)
    leases.grow(lease, len(tokens))
    return lease


def test_padding_page_is_never_leased() -> None:
    leases = _leases(5)
    lease = _run(leases, list(range(16)))
    assert sorted(lease.pages) == [1, 2, 3, 4]


def test_closed_prefix_is_found_again_in_whole_pages() -> None:
    leases = _leases()
    tokens = list(range(11))
    lease = _run(leases, tokens)
    pages = list(lease.pages)
    leases.close(lease, tokens)
    again = leases.open([*range(10), 99])
    assert again.num_cached_tokens == 8
    assert again.pages == pages[:2]


def test_prefixes_of_another_salt_are_not_found() -> None:
    leases, tokens = _leases(20), list(range(8))
    for salt in ("", "a", "b"):
        lease = leases.open([*tokens, 9], salt)
        assert lease.num_cached_tokens == 0
        leases.grow(lease, 9)
        leases.publish(lease, tokens)
        assert leases.open([*tokens, 9], salt).num_cached_tokens == 8
        leases.close(lease, [*tokens, 9])
    assert leases.num_cached_pages == 6
    assert leases.open([*tokens, 9], "c").num_cached_tokens == 0
    leases.check()


def test_at_least_one_token_is_left_to_compute() -> None:
    leases = _leases()
    tokens = list(range(8))
    leases.close(_run(leases, tokens), tokens)
    assert leases.open(tokens).num_cached_tokens == 4


def test_prefix_cache_off_shares_nothing() -> None:
    leases = _leases(prefix_cache=False)
    tokens = list(range(8))
    leases.close(_run(leases, tokens), tokens)
    assert leases.open([*tokens, 1]).num_cached_tokens == 0
    assert leases.num_free_pages == leases.num_pages


def test_unused_prefixes_are_evicted_oldest_first() -> None:
    leases = _leases(5)
    for start in (0, 100):
        tokens = list(range(start, start + 8))
        leases.close(_run(leases, tokens), tokens)
    lease = _run(leases, list(range(200, 204)))
    assert len(lease.pages) == 1
    assert leases.open([*range(100, 108), 1]).num_cached_tokens == 8
    assert leases.open([*range(8), 1]).num_cached_tokens == 4


def test_a_prefix_in_use_is_not_evicted() -> None:
    leases = _leases(5)
    tokens = list(range(8))
    leases.close(_run(leases, tokens), tokens)
    reader = leases.open([*tokens, 1])
    with pytest.raises(OutOfPages):
        leases.grow(leases.open([5] * 12), 12)
    assert reader.num_cached_tokens == 8
    assert leases.flush() == 0
    leases.check()


def test_running_out_changes_nothing() -> None:
    leases = _leases(4)
    lease = _run(leases, [1, 2, 3])
    pages = list(lease.pages)
    with pytest.raises(OutOfPages):
        leases.grow(lease, 100)
    assert lease.pages == pages
    leases.check()


def test_trying_to_grow_says_whether_it_did() -> None:
    leases = _leases(4)
    lease = leases.open([])
    assert leases.try_grow(lease, 7)
    assert len(lease.pages) == 2
    assert not leases.try_grow(lease, 100)
    assert len(lease.pages) == 2


def test_published_prompt_is_shared_while_its_owner_runs() -> None:
    leases = _leases()
    tokens = list(range(9))
    owner = _run(leases, tokens)
    leases.publish(owner, tokens)
    reader = leases.open([*range(8), 50])
    assert reader.pages == owner.pages[:2]
    leases.check()


def test_equal_prompts_computed_twice_keep_one_copy() -> None:
    leases = _leases()
    tokens = list(range(8))
    first, second = _run(leases, tokens), _run(leases, tokens)
    leases.publish(first, tokens)
    leases.publish(second, tokens)
    assert first.pages == second.pages
    leases.check()
    leases.close(first, tokens)
    leases.close(second, tokens)
    assert leases.num_cached_pages == 2
    assert leases.num_free_pages == leases.num_pages - 2


def test_check_finds_a_page_with_two_owners() -> None:
    leases = _leases()
    lease = _run(leases, [1, 2])
    other = _run(leases, [3, 4])
    other.pages.append(lease.pages[0])
    with pytest.raises(AssertionError, match="two owners"):
        leases.check()


@dataclass(slots=True)
class _Running:
    lease: KvLease
    tokens: list[int]


@settings(max_examples=150)
@given(st.data())
def test_random_traffic_keeps_every_page_owned_once(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 3))
    leases = KvLeases(
        num_groups * data.draw(st.integers(3, 14)),
        PAGE,
        prefix_cache=data.draw(st.booleans()),
        num_groups=num_groups,
    )
    running: list[_Running] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["open", "extend", "publish", "close", "flush"]))
        if action == "open":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            with suppress(OutOfPages):
                running.append(_Running(leases.open(tokens, num_tokens=len(tokens)), tokens))
        elif action == "flush":
            leases.flush()
        elif running:
            _act(leases, running, action, data)
        leases.check()
    for each in running:
        leases.close(each.lease, each.tokens)
    leases.check()
    assert leases.num_held_pages == 0
    leases.flush()
    assert leases.num_free_pages == leases.num_pages


def _act(leases: KvLeases, running: list[_Running], action: str, data: st.DataObject) -> None:
    each = running[data.draw(st.integers(0, len(running) - 1))]
    if action == "extend":
        each.tokens.extend(data.draw(st.lists(st.integers(0, 1), max_size=6)))
        try:
            leases.grow(each.lease, len(each.tokens))
        except OutOfPages:
            del each.tokens[len(each.lease.pages) * PAGE :]
    elif action == "publish":
        leases.publish(each.lease, each.tokens)
    else:
        leases.close(each.lease, each.tokens)
        running.remove(each)


def test_what_was_computed_with_replaced_weights_is_not_found_again() -> None:
    leases = _leases()
    tokens = list(range(11))
    leases.close(_run(leases, tokens), tokens)
    reader = leases.open([*tokens, 1])  # goes on with two pages of the old weights
    leases.grow(reader, 12)
    assert leases.retire() == 0
    leases.check()
    assert leases.open([*tokens, 1]).num_cached_tokens == 0
    leases.publish(reader, [*tokens, 1])
    assert leases.open([*tokens, 1]).num_cached_tokens == 0, "old pages are not shared"
    leases.close(reader, [*tokens, 1])
    leases.check()
    assert leases.num_cached_pages == 0


def test_retired_pages_that_nobody_reads_are_free_at_once() -> None:
    leases = _leases()
    tokens = list(range(8))
    leases.close(_run(leases, tokens), tokens)
    assert leases.retire() == 2
    assert leases.num_free_pages == leases.num_pages


def _groups(num_pages: int = 9) -> KvLeases:
    """Returns leases of two groups."""
    return KvLeases(2 * num_pages, PAGE, num_groups=2)


def test_each_group_has_a_range_of_pages_behind_its_padding() -> None:
    leases = _groups(5)
    found = [leases.open([key] * 16, num_tokens=16) for key in range(2)]
    assert [each.pages for each in found] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert (leases.num_pages, leases.num_group_pages) == (8, 4)
    with pytest.raises(OutOfPages, match="1 pages wanted; 0 are free"):
        leases.open([5], num_tokens=1)
    leases.check()


def test_sequences_come_to_the_group_with_most_room() -> None:
    leases = _groups()
    for key, num_tokens, expected in ((0, 12, 0), (1, 8, 1), (2, 8, 1), (3, 4, 0), (4, 4, 0)):
        lease = leases.open([key] * num_tokens, num_tokens=num_tokens)
        assert lease.group is leases._groups[expected]


def test_a_prefix_is_found_in_the_group_that_has_it() -> None:
    leases, tokens = _groups(30), list(range(16))
    leases.close(leases.open([99] * 8, num_tokens=8), ())
    busy = leases.open([7] * 8, num_tokens=8)
    owner = leases.open(tokens, num_tokens=16)
    assert owner.group is not busy.group
    leases.publish(owner, tokens)
    reader = leases.open([*tokens, 1], num_tokens=17)
    assert (reader.group, reader.num_cached_tokens) == (owner.group, 16)
    assert reader.pages[:4] == owner.pages
    leases.check()


def test_a_prefix_is_computed_again_where_its_group_is_full() -> None:
    leases, tokens = _groups(), list(range(8))
    owner = leases.open(tokens, num_tokens=8)
    leases.publish(owner, tokens)
    leases.grow(owner, 32)
    other = leases.open([*tokens, 1], num_tokens=9)
    assert other.group is not owner.group
    assert other.num_cached_tokens == 0
    leases.close(owner, range(32))
    leases.close(other, [*tokens, 1])
    assert leases.num_cached_pages == 8 + 2
    leases.check()


def test_a_prefix_in_much_the_fuller_group_is_computed_again() -> None:
    leases, tokens = _groups(100), list(range(4))
    owner = leases.open(tokens, num_tokens=4)
    leases.publish(owner, tokens)
    for num_pages, is_same in ((CACHED_PAGE_WEIGHT, True), (CACHED_PAGE_WEIGHT + 1, False)):
        leases.grow(owner, num_pages * PAGE)
        reader = leases.open([*tokens, 1], num_tokens=5)
        assert (reader.group is owner.group) is is_same
        leases.close(reader, ())


def test_a_lease_grows_within_its_group_alone() -> None:
    leases = _groups(5)
    lease = leases.open([1], num_tokens=1)
    assert not leases.try_grow(lease, 20)
    assert leases.try_grow(lease, 16)
    assert leases.try_branch(lease, 4, 20) is None
    leases.check()


def test_a_demand_that_cannot_be_met_evicts_nothing() -> None:
    leases, tokens = _leases(5), list(range(8))
    leases.close(_run(leases, tokens), tokens)
    assert not leases.try_grow(leases.open([]), 20)
    assert leases.num_cached_pages == 2


def test_retiring_ends_reuse_in_every_group() -> None:
    leases = _groups()
    for key in range(2):
        tokens = [key] * 8
        leases.close(leases.open(tokens, num_tokens=8), tokens)
    assert leases.num_cached_pages == 4
    assert leases.retire() == 4
    assert leases.num_free_pages == leases.num_pages
    leases.check()


def test_check_finds_a_page_of_another_group() -> None:
    leases = _groups()
    first, second = (leases.open([key], num_tokens=1) for key in range(2))
    first.pages, second.pages = second.pages, first.pages
    with pytest.raises(AssertionError, match="another group"):
        leases.check()


def test_pages_that_are_taken_one_by_one_do_not_each_go_through_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leases = _leases(1025)
    for first in range(256):
        tokens = [first, *range(1000, 1015)]
        leases.close(_run(leases, tokens), tokens)
    assert leases.num_cached_pages == 1024
    counts: list[int] = []
    evict = PrefixCache.evict

    def counted(cache: PrefixCache, num_pages: int) -> list[int]:
        counts.append(num_pages)
        return evict(cache, num_pages)

    monkeypatch.setattr(PrefixCache, "evict", counted)
    lease = leases.open([0])
    for length in range(0, 64 * PAGE, PAGE):
        leases.grow(lease, length + 1)
    assert counts == [8] * 8
    # What was used last is still there.
    assert leases.open([255, *range(1000, 1015), 0]).num_cached_tokens == 16
    leases.check()
