"""The policy learns fast enough to be on by default, by the clock of a cost model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.drafts import attachment
from services.target.drafts.draft_policy import DraftPolicy
from shared.models.decoder import Decoder
from shared.tokens import TreeShape
from tests.bench.adaptive import (
    Scenario,
    compare,
    gpu_step,
    gpu_tree,
    on_cpu,
    on_gpu,
    on_shared_cores,
    on_two_gpus,
)
from tests.helpers.engines import tiny_decoder
from tests.helpers.modelled_split import Kind, Served, Split, serve


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """What a step costs is the model of time's to say, so one layer is enough."""
    return tiny_decoder(tmp_path_factory.mktemp("tiny"), num_layers=1)


@pytest.mark.parametrize(
    ("scenario", "depths"),
    [
        # Where drafts are never right, plain is the best, as the control below shows.
        (Scenario(on_cpu(0.0), 12.0, 6.0), ()),
        (Scenario(on_cpu(0.8), 20.0, 10.0), (3,)),
        (Scenario(on_gpu(0.8), 4.0, 2.0), (7,)),
        (Scenario(on_gpu(0.8, hop_s=0.0025), 5.0, 3.5), (7,)),
        (Scenario(on_gpu(0.8, hop_s=0.01), 5.0, 2.0), (7,)),
        (Scenario(on_gpu(0.6, 64), 3.0, 1.5), (3,)),
        (Scenario(on_two_gpus(0.0), 6.0, 3.0), ()),
    ],
    ids=["cpu 0", "cpu 80", "gpu 80", "5 ms", "20 ms", "gpu 64", "two gpus 0"],
)
def test_it_comes_close_to_the_best_fixed_choice_and_is_never_below_plain(
    decoder: Decoder, scenario: Scenario, depths: tuple[int, ...]
) -> None:
    found = compare(decoder, scenario, depths)
    assert found.over_plain > 0.91, "the learning included"
    assert found.late_over_plain > 0.92
    assert found.over_best > 0.9


def test_the_pinned_chain_of_3_shows_what_a_wrong_choice_costs(decoder: Decoder) -> None:
    """Negative control: the scenarios tell good choices from bad ones."""
    found = compare(decoder, Scenario(on_cpu(0.0), 5.0, 1.0), (3,))
    assert found.pinned_rates[3] < 0.6 * found.plain_rate


@pytest.mark.parametrize(("right", "size", "num_prompt_tokens"), [(0.4, 1, 40), (0.7, 4, 200)])
def test_where_target_and_draft_share_cores_it_is_not_below_plain(
    decoder: Decoder, right: float, size: int, num_prompt_tokens: int
) -> None:
    split = on_shared_cores(right, size, num_prompt_tokens=num_prompt_tokens)
    found = compare(decoder, Scenario(split, 20.0, 10.0), (3,))
    assert found.over_plain > 0.9, "the learning included"
    assert found.late_over_plain >= 0.94
    assert found.pinned_rates[3] < 0.97 * found.plain_rate, "negative control"


def _by_time(before: float, after: float, *, start_s: float, end_s: float) -> Split:
    def right(now_s: float, sequence_id: int) -> float:
        return after if start_s <= now_s < end_s else before

    split = on_gpu(0.0)
    return replace(split, drafts=(replace(split.drafts[0], right=right),))


def _served(decoder: Decoder, split: Split, duration_s: float) -> tuple[float, Served]:
    """Returns the tokens a second of plain decoding, which do not change, and what was chosen."""
    plain = serve(decoder, split, 3.0, None, is_plain=True)
    return plain.rate(1.0, 3.0), serve(decoder, split, duration_s, DEFAULT_CONFIG)


def _gain(plain: float, adaptive: Served, start_s: float, end_s: float) -> float:
    return adaptive.rate(start_s, end_s) / plain


def test_it_follows_a_text_that_drafts_get_wrong_for_a_while(decoder: Decoder) -> None:
    split = _by_time(0.9, 0.0, start_s=3.0, end_s=7.0)
    plain, adaptive = _served(decoder, split, 12.0)
    assert _gain(plain, adaptive, 1.0, 3.0) > 2.5
    assert _gain(plain, adaptive, 3.5, 7.0) > 0.8
    assert _gain(plain, adaptive, 5.0, 7.0) > 0.93
    assert _gain(plain, adaptive, 9.0, 12.0) > 2.5, "a probe has found that it pays again"


def test_it_follows_a_draft_that_slows_down_for_a_while(decoder: Decoder) -> None:
    draft = Kind(
        gpu_tree,
        lambda now_s, sequence_id: 0.8,
        slower=lambda now_s: 25.0 if 3.0 <= now_s < 7.0 else 1.0,
    )
    plain, adaptive = _served(decoder, Split(gpu_step, (draft,)), 18.0)
    assert _gain(plain, adaptive, 1.0, 3.0) > 2.0
    assert _gain(plain, adaptive, 4.3, 7.0) > 0.9
    assert _gain(plain, adaptive, 16.0, 18.0) > 1.4, "the trial in the slow time has been earned"


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("late_s", [0.05, math.inf], ids=["late", "silent"])
def test_a_draft_that_becomes_late_or_silent_costs_next_to_nothing(
    decoder: Decoder, late_s: float, size: int
) -> None:
    split = _late_from(3.0, late_s, size)
    plain = serve(decoder, split, 3.0, None, is_plain=True).rate(1.0, 3.0)
    served = serve(decoder, split, 7.0, DEFAULT_CONFIG)
    assert _gain(plain, served, 3.0, 4.0) > 0.88
    assert _gain(plain, served, 3.0, 7.0) > 0.96


def test_a_draft_that_falls_silent_in_a_trial_of_other_trees_costs_next_to_nothing(
    decoder: Decoder,
) -> None:
    split, seed = _late_from(3.0, math.inf, 32), 1
    plain = serve(decoder, split, 3.0, None, is_plain=True, seed=seed).rate(1.0, 3.0)
    served = serve(decoder, split, 7.0, DEFAULT_CONFIG, seed=seed)
    assert _gain(plain, served, 3.0, 7.0) > 0.95


def test_without_a_bound_waiting_for_a_late_draft_can_be_dear(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one run in which the draft is waited for again and again."""
    split, seed = _late_from(3.0, 0.05, 1), 4
    plain = serve(decoder, split, 3.0, None, is_plain=True, seed=seed).rate(1.0, 3.0)
    bounded = serve(decoder, split, 5.0, DEFAULT_CONFIG, seed=seed)
    monkeypatch.setattr(DraftPolicy, "worthwhile_wait_s", math.inf)
    monkeypatch.setattr(attachment, "PROBE_SHARE", 1.0)
    unbounded = serve(decoder, split, 5.0, DEFAULT_CONFIG, seed=seed)
    assert _gain(plain, bounded, 3.0, 5.0) > 0.92
    assert _gain(plain, unbounded, 3.0, 5.0) < 0.75


def _late_from(start_s: float, late_s: float, size: int) -> Split:
    split = on_two_gpus(0.9, size)
    late = replace(split.drafts[0], late_s=lambda now_s: late_s if now_s >= start_s else 0.0)
    return replace(split, drafts=(late,))


def test_under_load_it_turns_itself_off_and_then_on_again(decoder: Decoder) -> None:
    split = replace(on_gpu(0.3), num_streams=lambda now_s: 48 if 2.0 <= now_s < 4.0 else 1)
    right = lambda now_s, sequence_id: 0.75 if now_s < 2.0 or now_s >= 4.0 else 0.3  # noqa: E731
    split = replace(split, drafts=(replace(split.drafts[0], right=right),))
    served = serve(decoder, split, 7.0, DEFAULT_CONFIG)
    loaded = serve(decoder, replace(split, num_streams=lambda now_s: 48), 2.0, None, is_plain=True)
    assert _gain(loaded.rate(1.0, 2.0), served, 3.0, 4.0) > 0.93, "trees are left to trials"
    [draft] = served.drafts
    assert sum(at_s > 6.0 for at_s, _ in draft.shapes) > 100


def test_a_draft_that_drafts_ahead_is_taken_up_although_each_shape_is_captured_first(
    decoder: Decoder,
) -> None:
    """Two GPUs: what a trial shows while graphs are captured is not taken for what it will be."""
    plain, adaptive = _served(decoder, on_two_gpus(0.9), 8.0)
    assert _gain(plain, adaptive, 0.0, 1.0) > 0.9
    assert _gain(plain, adaptive, 1.0, 3.0) > 1.4
    assert _gain(plain, adaptive, 5.0, 8.0) > 2.0, "another depth is captured once more"


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_a_fresh_distant_draft_is_used_at_once_and_stays_in_use(
    decoder: Decoder, delay_s: float
) -> None:
    """One request at a time. New answers, whose prompts the draft has to read, and trees that are
    ten times slower at first say nothing about the trees to come."""
    split = on_two_gpus(0.92, capture_s=0.0)
    draft = replace(split.drafts[0], hop_s=0.0006 + delay_s, prompt_s=0.015)
    split = replace(split, drafts=(draft,), num_tokens=512)
    plain = serve(decoder, split, 3.0, None, is_plain=True).rate(1.0, 3.0)
    best = max(
        serve(decoder, split, 4.0, None, pinned=TreeShape(depth, 1, depth + 1)).rate(2.0, 4.0)
        for depth in (3, 5, 7)
    )
    assert best > 2.3 * plain
    for num_cold, warm_s in ((0, 1), (40, 4)):
        fresh = replace(split, drafts=(replace(draft, num_cold=num_cold),))
        served = serve(decoder, fresh, 14.0, DEFAULT_CONFIG)
        assert served.rate(warm_s, 14.0) > 0.9 * best
        for start_s in range(warm_s, 14):
            assert served.rate(start_s, start_s + 1.0) > 0.75 * best


@pytest.mark.parametrize(("size", "settled_s", "gain"), [(8, 4.0, 1.5), (32, 10.0, 1.2)])
def test_a_draft_that_was_slow_at_first_is_not_judged_by_that(
    decoder: Decoder, size: int, settled_s: float, gain: float
) -> None:
    """A large target, and a large draft that answers each verdict."""

    def step_s(rows: int) -> float:
        return 0.019 + 0.00004 * rows + 0.00008 * max(rows - 64, 0)

    def tree_s(steps: int, size: int) -> float:
        return 0.001 + steps * (0.0028 + 0.00002 * size)

    draft = Kind(
        tree_s, lambda now_s, stream: 0.92, hop_s=0.0007, prompt_s=0.02, num_cold=6, cold=20.0,
        capture_s=0.3,
    )  # fmt: skip
    split = Split(step_s, (draft,), lambda now_s: size, num_tokens=256, noise=0.05)
    plain, adaptive = _served(decoder, split, 14.0)
    assert _gain(plain, adaptive, settled_s, 14.0) > gain


def test_a_pinned_draft_is_asked_for_no_other_shape(decoder: Decoder) -> None:
    served = serve(decoder, on_cpu(0.8), 2.5, DEFAULT_CONFIG, pinned=TreeShape(2, 1, 3))
    assert {shape.num_steps for _, shape in served.drafts[0].shapes} == {2}
    assert len(served.drafts[0].shapes) > 40
