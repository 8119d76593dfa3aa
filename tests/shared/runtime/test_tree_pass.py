"""Which graphs passes of whole trees have, and what they do without; making them needs CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.models.loader import load_decoder
from shared.runtime.round_batches import RoundShape
from shared.runtime.round_state import RoundSampling
from shared.runtime.tree_draft import PackedTrees
from shared.runtime.tree_model import DecoderModel, PassKind
from shared.runtime.tree_pass import OpenSequence, PassLimits, TreePass, slot_buckets
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import GREEDY, VOCAB_SIZE

MAX_SEQUENCES, CONTEXT, PAGE_SIZE = 6, 64, 8
CPU = torch.device("cpu")


class GraphlessPass(TreePass):
    """A device without memory for graphs.

    Attributes:
        asked: the slots and the kind of each graph that was tried.
    """

    _model: DecoderModel

    def __init__(self, model: DecoderModel, shape: RoundShape) -> None:
        limits = PassLimits(MAX_SEQUENCES, CONTEXT, has_graphs=True)
        super().__init__(model, shape, limits, PassKind(), memory=None)
        self.asked: list[tuple[int, RoundSampling]] = []

    def _capture(self, num_slots: int, sampling: RoundSampling) -> NoReturn:
        self.asked.append((num_slots, sampling))
        raise torch.OutOfMemoryError("no memory is left")


@pytest.fixture
def graphless(tmp_path_factory: pytest.TempPathFactory) -> GraphlessPass:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("draft"),
        shape=TinyShape(vocab_size=VOCAB_SIZE, max_position_embeddings=128),
    )
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    model = DecoderModel(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 64, CPU))
    shape = RoundShape.of(
        TreeShape(2, 2, 8), draft_vocab_size=VOCAB_SIZE, max_context_tokens=CONTEXT
    )
    return GraphlessPass(model, shape)


def _of_a_group(graphless: GraphlessPass) -> GraphlessPass:
    """Returns one whose model another process shares."""
    group = TensorGroup(0, 2, lambda *_: None)
    decoder = replace(graphless._model.decoder, group=group)
    return GraphlessPass(DecoderModel(decoder, graphless._pool), graphless.shape)


def _sequence(sampling: SamplingParams, first_page: int) -> OpenSequence:
    return OpenSequence((1, 2), 0, -1, sampling, range(first_page, first_page + 2))


@torch.inference_mode()
def _result(graphless: GraphlessPass, batch: Sequence[OpenSequence]) -> Tensor:
    [trees] = filter(None, graphless.begin(batch, ()))
    assert isinstance(trees, PackedTrees)
    return trees.numbers


def test_every_number_of_sequences_has_one_of_a_few_graphs() -> None:
    assert slot_buckets(1) == (1,)
    assert slot_buckets(6) == (1, 2, 4, 6)
    assert slot_buckets(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    for most in (100, 300, 2000):
        buckets = slot_buckets(most)
        assert buckets[-1] == most
        assert len(buckets) < 20
        assert list(buckets) == sorted(set(buckets))


def test_a_graph_that_has_no_memory_is_tried_once(graphless: GraphlessPass) -> None:
    batch = [_sequence(GREEDY, 1), _sequence(GREEDY, 3), _sequence(GREEDY, 5)]
    results = [_result(graphless, batch).clone() for _ in range(2)]
    assert graphless.asked == [(4, RoundSampling.GREEDY)]
    assert torch.equal(*results)
    assert len(results[0]) == len(batch)


def test_a_few_graphs_do_for_every_smaller_number_of_sequences(
    graphless: GraphlessPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is there, and not much too large, is taken before one is made."""
    captured = object()
    asked: list[int] = []

    def capture(num_slots: int, sampling: RoundSampling) -> object:
        asked.append(num_slots)
        return captured

    monkeypatch.setattr(graphless, "_capture", capture)
    monkeypatch.setattr(graphless, "_buckets", slot_buckets(64))
    greedy = RoundSampling.GREEDY
    assert graphless.uncaptured_for(64, greedy) == [(size, greedy) for size in (64, 16, 4)]
    while graphless.capture_first(graphless.uncaptured_for(64, greedy)):
        pass
    assert asked == [64, 16, 4]
    served = {count: graphless._bucket_for(count, greedy) for count in (1, 3, 5, 15, 16, 17, 64)}
    assert served == {1: 4, 3: 4, 5: 16, 15: 16, 16: 16, 17: 64, 64: 64}
    drawn = RoundSampling.DRAWN
    assert graphless.uncaptured_for(20, drawn) == [(32, drawn), (8, drawn)], "each kind has its own"


def test_graphs_left_are_those_of_kinds_met_the_largest_first(graphless: GraphlessPass) -> None:
    greedy, drawn = RoundSampling.GREEDY, RoundSampling.DRAWN
    assert not graphless.capture_first(graphless.uncaptured(()))
    _result(graphless, [_sequence(GREEDY, 1)])
    _result(graphless, [_sequence(SamplingParams(seed=3), 1), _sequence(GREEDY, 3)])
    assert graphless.asked == [(1, greedy), (2, drawn)]
    graphless.asked.clear()
    while graphless.capture_first(graphless.uncaptured((greedy, drawn))):
        pass
    largest = [(6, greedy), (6, drawn)]
    smaller = [(1, drawn), (2, greedy), (4, greedy), (4, drawn)]
    assert graphless.asked == [*largest, *smaller]


def test_a_group_does_not_go_on_without_a_graph(graphless: GraphlessPass) -> None:
    """The other processes wait in the middle of it."""
    with pytest.raises(torch.OutOfMemoryError):
        _of_a_group(graphless).begin([_sequence(GREEDY, 1)], ())


def test_a_pass_that_is_wanted_no_more_takes_its_graphs_from_the_group(
    graphless: GraphlessPass,
) -> None:
    grown = _of_a_group(graphless)
    group = grown._model.group
    assert group is not None
    other, *own = (object() for _ in range(3))
    group.graphs.extend([other, *own])  # type: ignore[list-item]
    grown._captured[1, RoundSampling.GREEDY] = [(graph, None) for graph in own]  # type: ignore[misc]
    grown.release()
    assert group.graphs == [other]
