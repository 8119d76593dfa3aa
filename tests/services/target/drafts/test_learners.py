"""A learner is shown sequences that have ended with the features of a plain forward, however they
were decoded, and never one that it must not learn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage, DraftTimeout
from services.target.drafts.feature_store import MAX_STORES, FeatureSpec
from services.target.engine import Engine
from services.target.weight_control import WeightVersion
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import build_engine, request, run
from tests.helpers.plain_forward import plain_forward
from tests.helpers.shared_head_rounds import SilentDraft, sharing_head, write_pair

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 11, 12], [20, 21])
SAMPLING = SamplingParams(seed=7)


class _Port:
    """Keeps what a learner is told.

    Attributes:
        room: messages that it still takes.
    """

    def __init__(self, room: int = 1000) -> None:
        self.messages: list[DraftMessage] = []
        self.room = room
        self.is_closed = False

    def send(self, message: DraftMessage) -> bool:
        if len(self.messages) == self.room:
            return False
        self.messages.append(message)
        return True

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder / "target", folder / "head", torch.device("cpu"))


def _learner(pair: Pair, port: _Port, max_context_tokens: int | None = None) -> Attachment:
    wanted = pair.head.feature_spec
    return Attachment(
        DraftIdentity("learner", "w", "m", "EAGLE3", 1, 0.0),
        port,
        DraftTimeout(0.0),
        FeatureSpec("embedded", wanted.layer_indices, wanted.dtype, wanted.projection),
        learns=True,
        max_context_tokens=max_context_tokens,
    )


def _engine(pair: Pair, *, has_lanes: bool) -> Engine:
    engine = build_engine(pair.decoder, num_pages=200)
    if has_lanes:
        engine.attach(sharing_head(pair, SilentDraft(), TreeShape(4, 2, 8), {}, is_pinned=True))
    return engine


@pytest.mark.parametrize("has_lanes", [False, True])
@pytest.mark.parametrize("longest", [None, 12])
def test_a_learner_gets_whole_sequences(
    pair: Pair, longest: int | None, *, has_lanes: bool
) -> None:
    engine = _engine(pair, has_lanes=has_lanes)
    port = _Port()
    engine.attach(_learner(pair, port, longest))
    requests = [request(prompt, SAMPLING, StopParams(30)) for prompt in PROMPTS]
    collector = run(engine, requests)
    wholes = [[*prompt, *collector.token_ids(key)] for key, prompt in enumerate(PROMPTS)]
    shown = {}
    for message in port.messages:
        ([opened], [rows]) = (message.opened, message.features)
        shown[opened.token_ids] = rows
        assert not message.verdicts
        assert not message.closed
    assert set(shown) == {tuple(whole[-(longest or 0) :]) for whole in wholes}
    spec = pair.head.feature_spec
    assert spec.projection is not None
    for whole in wholes:
        rows = shown[tuple(whole[-(longest or 0) :])]
        layers = [index for index in spec.layer_indices if index <= 6]
        features = torch.cat(plain_forward(pair.decoder, whole, (0,), layers).features, dim=-1)
        expected = features[:-1] @ spec.projection.T
        torch.testing.assert_close(rows.rows, expected[-len(rows.rows) :], atol=1e-4, rtol=1e-4)


def test_what_must_not_be_learnt_is_never_shown(pair: Pair) -> None:
    engine = _engine(pair, has_lanes=True)
    port = _Port()
    engine.attach(_learner(pair, port))
    first, second, _ = (request(prompt, SAMPLING) for prompt in PROMPTS)
    run(engine, [replace(first, never_learnt=True), second])
    [message] = port.messages
    assert message.opened[0].token_ids[: len(PROMPTS[1])] == tuple(PROMPTS[1])


def test_a_slow_learner_misses_sequences_and_keeps_its_place(pair: Pair) -> None:
    engine = _engine(pair, has_lanes=False)
    port = _Port(room=1)
    engine.attach(_learner(pair, port))
    requests = [request(prompt, SAMPLING) for prompt in PROMPTS]
    run(engine, requests)
    assert len(port.messages) == 1
    assert not port.is_closed
    port.room = 1000
    run(engine, requests)
    assert len(port.messages) == 1 + len(PROMPTS)


def test_a_learner_that_takes_no_messages_is_dropped_with_its_features(pair: Pair) -> None:
    """Learners of other features find room again and again."""
    engine = _engine(pair, has_lanes=False)
    for number in range(MAX_STORES + 1):
        port = _Port(room=0)
        learner = _learner(pair, port)
        assert learner.feature_spec is not None
        learner.feature_spec = replace(learner.feature_spec, key=f"features {number}")
        engine.attach(learner)
        run(engine, [request(PROMPTS[0])])
        assert learner.refusal is None
        assert not port.is_closed, "a sequence may be missed"
        learner.outbox.weights = WeightVersion("second", 1)
        run(engine, [request(PROMPTS[1])])
        assert port.is_closed
        engine.detach("learner")  # its stream has ended


def test_a_learner_that_left_is_told_no_more(pair: Pair) -> None:
    engine = _engine(pair, has_lanes=False)
    port = _Port()
    engine.attach(_learner(pair, port))
    run(engine, [request(PROMPTS[0])])
    engine.detach("learner")
    run(engine, [request(PROMPTS[1])])
    assert len(port.messages) == 1
