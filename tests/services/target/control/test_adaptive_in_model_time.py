"""The controller learns fast enough to be on by default, by the clock of a cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.speculation_controller import SpeculationController
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

NEARLY = 0.96


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("scenario", "depths"),
    [
        (Scenario(on_cpu(0.0), 30.0, 4.0), (3,)),
        (Scenario(on_cpu(0.8), 16.0, 2.0), (2, 3)),
        (Scenario(on_cpu(0.95), 16.0, 2.0), (3, 7)),
        (Scenario(on_gpu(0.0), 6.0, 2.0), (3,)),
        (Scenario(on_gpu(0.8), 6.0, 1.0), (3, 7)),
        (Scenario(on_gpu(0.8, hop_s=0.0025), 6.0, 1.0), (3, 7)),
        (Scenario(on_gpu(0.8, hop_s=0.01), 12.0, 2.0), (3, 7)),
    ],
    ids=["cpu 0", "cpu 80", "cpu 95", "gpu 0", "gpu 80", "gpu 80, 5 ms", "gpu 80, 20 ms"],
)
def test_it_comes_close_to_the_best_fixed_choice_and_is_never_below_plain(
    decoder: Decoder, scenario: Scenario, depths: tuple[int, ...]
) -> None:
    found = compare(decoder, scenario, depths)
    assert found.over_plain > NEARLY, "the learning included"
    assert found.over_best > NEARLY


def test_the_pinned_chain_of_3_shows_what_a_wrong_choice_costs(decoder: Decoder) -> None:
    """Negative control: the scenarios tell good choices from bad ones."""
    found = compare(decoder, Scenario(on_cpu(0.0), 4.0, 1.0), (3,))
    assert found.late_pinned[3] < 0.6 * found.plain.rate(1.0, 4.0)


@pytest.mark.parametrize(
    ("right", "size", "num_prompt_tokens"),
    [(0.4, 1, 40), (0.8, 4, 40), (0.6, 16, 40), (0.7, 4, 200)],
)
def test_where_target_and_draft_share_cores_it_is_not_below_plain(
    decoder: Decoder, right: float, size: int, num_prompt_tokens: int
) -> None:
    split = on_shared_cores(right, size, num_prompt_tokens=num_prompt_tokens)
    found = compare(decoder, Scenario(split, 40.0, 10.0), (3,))
    assert found.over_plain > 0.94, "the learning included"
    assert found.late_over_plain >= 0.98
    assert found.late_pinned[3] < 0.97 * found.plain.rate(10.0, 40.0), "negative control"


def test_without_the_referee_shared_cores_go_unnoticed(decoder: Decoder) -> None:
    """Negative control: the best that the model of a cycle finds is below plain there."""
    controller = SpeculationController(AdaptiveConfig({1: Candidates(may_pause=False)}))
    split = on_shared_cores(0.6, 4)
    plain = serve(decoder, split, 20.0, SpeculationController(None), is_plain=True)
    assert _gain(plain, serve(decoder, split, 20.0, controller), 5.0, 20.0) < 0.9


def _by_time(before: float, after: float, *, start_s: float, end_s: float) -> Split:
    def right(now_s: float, sequence_id: int) -> float:
        return after if start_s <= now_s < end_s else before

    split = on_gpu(0.0)
    return replace(split, drafts=(replace(split.drafts[0], right=right),))


def _served(decoder: Decoder, split: Split, duration_s: float) -> tuple[Served, Served]:
    plain = serve(decoder, split, duration_s, SpeculationController(None), is_plain=True)
    return plain, serve(decoder, split, duration_s, SpeculationController())


def _gain(plain: Served, adaptive: Served, start_s: float, end_s: float) -> float:
    return adaptive.rate(start_s, end_s) / plain.rate(start_s, end_s)


def test_it_follows_a_text_that_drafts_get_wrong_for_a_while(decoder: Decoder) -> None:
    split = _by_time(0.9, 0.0, start_s=3.0, end_s=7.0)
    plain, adaptive = _served(decoder, split, 12.0)
    assert _gain(plain, adaptive, 1.0, 3.0) > 2.5
    assert _gain(plain, adaptive, 3.5, 7.0) > 0.95
    assert _gain(plain, adaptive, 9.0, 12.0) > 2.5, "a probe has found that it pays again"


def test_it_follows_a_draft_that_slows_down_for_a_while(decoder: Decoder) -> None:
    draft = Kind(
        gpu_tree,
        lambda now_s, sequence_id: 0.8,
        slower=lambda now_s: 25.0 if 3.0 <= now_s < 7.0 else 1.0,
    )
    plain, adaptive = _served(decoder, Split(gpu_step, (draft,)), 20.0)
    assert _gain(plain, adaptive, 1.0, 3.0) > 2.0
    assert _gain(plain, adaptive, 4.3, 7.0) > 0.94
    assert _gain(plain, adaptive, 17.0, 20.0) > 1.6, "the trial in the slow time has been earned"


def test_under_load_it_turns_itself_off_and_then_on_again(decoder: Decoder) -> None:
    split = replace(on_gpu(0.3), num_streams=lambda now_s: 48 if 2.0 <= now_s < 4.0 else 1)
    right = lambda now_s, sequence_id: 0.75 if now_s < 2.0 or now_s >= 4.0 else 0.3  # noqa: E731
    split = replace(split, drafts=(replace(split.drafts[0], right=right),))
    served = serve(decoder, split, 8.0, SpeculationController())
    [draft] = served.drafts
    plain_step_s = gpu_step(48)
    loaded = [at_s for at_s, _ in draft.shapes if 2.0 + 60 * plain_step_s <= at_s < 4.0]
    assert len(loaded) * plain_step_s < 0.35 * 2.0, "trees are left to probes and newcomers"
    assert sum(at_s > 6.0 for at_s, _ in draft.shapes) > 100


def _ahead(hit_rate: float, hop_s: float, ahead_s: float, beside: float) -> Split:
    """A draft that prepares for up to 8 verdicts."""
    draft = Kind(
        gpu_tree,
        lambda now_s, sequence_id: 0.8,
        hop_s=hop_s,
        budget=8,
        ahead_s=lambda steps, num_outcomes: ahead_s,
        hit_rate=hit_rate,
    )
    return Split(gpu_step, (draft,), beside=beside)


@pytest.mark.parametrize(
    ("split", "most"),
    [(_ahead(0.8, 0.004, 0.002, 1.0), True), (_ahead(0.1, 0.0003, 0.003, 1.8), False)],
    ids=["far away", "on one device"],
)
def test_verdicts_are_prepared_for_where_that_pays(
    decoder: Decoder, split: Split, most: bool
) -> None:
    adaptive = serve(decoder, split, 10.0, SpeculationController())
    late = adaptive.drafts[0].budgets[len(adaptive.drafts[0].budgets) // 2 :]
    share = sum(budget > 0 for budget in late) / len(late)
    assert share > 0.8 if most else share < 0.2


def test_a_draft_that_drafts_ahead_is_taken_up_although_each_shape_is_captured_first(
    decoder: Decoder,
) -> None:
    """Two GPUs: what a trial shows while graphs are captured is not taken for what it will be."""
    plain, adaptive = _served(decoder, on_two_gpus(0.9), 8.0)
    assert _gain(plain, adaptive, 0.0, 1.0) > 0.9
    assert _gain(plain, adaptive, 1.0, 3.0) > 1.4
    assert _gain(plain, adaptive, 5.0, 8.0) > 2.2, "another depth is captured once more"


@pytest.mark.parametrize(("right", "steps"), [(0.5, {2, 3}), (0.9, {5, 7})])
def test_a_depth_is_chosen_whose_trees_come_in_time(
    decoder: Decoder, right: float, steps: set[int]
) -> None:
    """At 3 steps all trees that are drafted ahead come in time, at 5 they are a little late, at 7
    by half a step; the best fixed depths are 3 and 5, and 2 and 7 are nearly as good."""
    plain, adaptive = _served(decoder, on_two_gpus(right), 14.0)
    [draft] = adaptive.drafts
    late = [shape.num_steps for at_s, shape in draft.shapes if at_s > 10.0]
    assert sum(each in steps for each in late) > 0.8 * len(late)
    assert sum(budget > 0 for budget in draft.budgets[-400:]) > 300, "it drafts ahead"
    assert _gain(plain, adaptive, 10.0, 14.0) > (1.15 if right < 0.9 else 2.5)


@pytest.mark.parametrize(("right", "size"), [(0.0, 1), (0.9, 8), (0.9, 32)])
def test_graphs_that_are_captured_in_vain_cost_plain_decoding_little(
    decoder: Decoder, right: float, size: int
) -> None:
    found = compare(decoder, Scenario(on_two_gpus(right, size), 12.0, 4.0), (3,))
    assert found.over_plain > 0.92, "the learning included"
    assert found.late_over_plain > 0.96


def test_a_pinned_draft_is_left_to_itself(decoder: Decoder) -> None:
    served = serve(decoder, on_cpu(0.0), 2.0, SpeculationController(), pinned=TreeShape(2, 1, 3))
    assert {shape.num_steps for _, shape in served.drafts[0].shapes} == {2}
    assert len(served.drafts[0].shapes) > 40


def test_what_a_pinned_draft_does_is_not_taken_for_plain_decoding(decoder: Decoder) -> None:
    controller = SpeculationController()
    pinned = TreeShape(3, 1, 4)
    served = serve(decoder, on_cpu(0.0, 4), 8.0, controller, pinned=pinned)
    plain = serve(decoder, on_cpu(0.0, 4), 8.0, SpeculationController(None), is_plain=True)
    assert _gain(plain, served, 4.0, 8.0) < 0.7, "it costs that much"
    for regime in controller.referee.regimes.values():
        assert regime.estimate.level == pytest.approx(1.0, abs=0.1)
