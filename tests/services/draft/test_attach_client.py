"""The link to one target, against a real SpeculationService."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from services.draft.attach_client import AttachClient, Backoff
from services.draft.engine import DraftEngine
from services.draft.events import MAX_TREE_NODES, LinkStatus, WorkerIdentity
from shared.errors import FailedPrecondition
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import add_verdicts
from shared.tokens import Outcome, TokenTree, TreeShape, Verdict
from tests.services.draft.scripted_drafter import ScriptedDrafter
from tests.services.draft.scripted_target import WAIT_S, Conversation, ScriptedTarget

IDENTITY = WorkerIdentity(
    worker_id="worker",
    model_id="tiny",
    algorithm="STANDALONE",
    tokenizer_sha256="ab" * 32,
    max_sequences=5,
    max_context_tokens=128,
)
ATTACHED = pb.Attached(
    attachment_id="attachment-1",
    max_node_count=8,
    max_sequence_count=5,
    verification_mode=pb.VERIFICATION_MODE_COUPLED,
    vocab_size=1_000,
)


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter(num_slots=2)


@pytest.fixture
def engine(drafter: ScriptedDrafter) -> Iterator[DraftEngine]:
    engine = DraftEngine(drafter, TreeShape(2, 1, 3), chunk_tokens=100, max_sequences=5)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
async def target() -> AsyncIterator[ScriptedTarget]:
    target = ScriptedTarget(ATTACHED)
    await target.start()
    yield target
    await target.stop()


def _client(target: ScriptedTarget, engine: DraftEngine, **options: int) -> AttachClient:
    backoff = Backoff(first_s=0.01, longest_s=0.05)
    return AttachClient(target.address, IDENTITY, engine, backoff, **options)


@pytest.fixture
async def client(target: ScriptedTarget, engine: DraftEngine) -> AsyncIterator[AttachClient]:
    client = _client(target, engine)
    run = asyncio.create_task(client.run())
    yield client
    client.detach()
    await asyncio.wait_for(run, WAIT_S)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def _opened(sequence_id: int, *token_ids: int, round_: int = 0) -> pb.SequenceOpenedBatch:
    sequence = pb.SequenceOpened(
        sequence_id=sequence_id, token_ids=token_ids, round=round_, prompt_token_count=1
    )
    sequence.sampling_params.seed = 1
    return pb.SequenceOpenedBatch(sequences=[sequence])


def _verdicts(sequence_id: int, round_: int, tokens: list[int], count: int) -> pb.VerdictBatch:
    batch = pb.VerdictBatch()
    accepted = tuple(range(len(tokens) - 1))
    add_verdicts(
        batch, [Verdict(sequence_id, round_, Outcome.VERIFIED, accepted, tuple(tokens), count)]
    )
    return batch


async def test_the_first_message_introduces_the_worker(
    target: ScriptedTarget, client: AttachClient
) -> None:
    attach = await asyncio.wait_for(target.attaches.get(), WAIT_S)
    assert attach == pb.Attach(
        worker_id="worker",
        model_id="tiny",
        tokenizer_sha256="ab" * 32,
        max_sequence_count=5,
        max_node_count=MAX_TREE_NODES,
        algorithm="STANDALONE",
        max_context_token_count=128,
    )
    await _until(lambda: client.status.attachment_id is not None)
    assert client.status == LinkStatus(target.address, "attachment-1", None)


async def test_opened_and_verdict_are_answered_with_the_right_fence(
    target: ScriptedTarget, client: AttachClient
) -> None:
    conversation = await target.conversation()
    conversation.tell(opened=_opened(4, 1, 2, 3, round_=6))
    (candidate,) = await conversation.hear_candidates()
    assert (candidate.sequence_id, candidate.round, candidate.committed_token_count) == (4, 6, 3)
    assert candidate.tree == TokenTree.chain([3, 4])
    conversation.tell(verdicts=_verdicts(4, 6, [3, 4, 77], 6))
    (candidate,) = await conversation.hear_candidates()
    assert (candidate.sequence_id, candidate.round, candidate.committed_token_count) == (4, 7, 6)
    assert candidate.tree == TokenTree.chain([6, 7])


async def test_messages_for_unknown_sequences_are_dropped(
    target: ScriptedTarget, client: AttachClient
) -> None:
    conversation = await target.conversation()
    conversation.tell(verdicts=_verdicts(99, 1, [5], 9))
    conversation.tell(closed=pb.SequenceClosedBatch(sequence_ids=[98]))
    conversation.tell(opened=_opened(4, 1, 2, 3))
    (candidate,) = await conversation.hear_candidates()
    assert candidate.sequence_id == 4


async def test_a_sequence_without_memory_is_released(
    target: ScriptedTarget, client: AttachClient
) -> None:
    conversation = await target.conversation()
    for sequence_id in (1, 2):
        conversation.tell(opened=_opened(sequence_id, 1, 2))
        await conversation.hear_candidates()
    conversation.tell(opened=_opened(3, 1, 2))
    release = await conversation.hear()
    assert release == pb.SpeculateRequest(release=pb.Release(sequence_ids=[1]))
    (candidate,) = await conversation.hear_candidates()
    assert candidate.sequence_id == 3


async def test_a_drain_makes_the_draft_leave_and_come_back(
    target: ScriptedTarget, client: AttachClient, engine: DraftEngine
) -> None:
    conversation = await target.conversation()
    conversation.tell(opened=_opened(1, 1, 2))
    await conversation.hear_candidates()
    conversation.tell(drain=pb.Drain())
    assert await conversation.hear() is None, "the draft ends its side"
    again = await target.conversation()
    assert engine.num_sequences == 0
    again.tell(opened=_opened(1, 1, 2))
    assert await again.hear_candidates()


async def test_a_target_that_dies_is_attached_to_again_when_it_is_back(
    engine: DraftEngine, drafter: ScriptedDrafter
) -> None:
    first = ScriptedTarget(ATTACHED)
    await first.start()
    client = _client(first, engine)
    run = asyncio.create_task(client.run())
    conversation = await first.conversation()
    conversation.tell(opened=_opened(1, 1, 2))
    await conversation.hear_candidates()
    await first.stop()
    await _until(lambda: client.status.last_error is not None)
    assert client.status.attachment_id is None
    await _until(lambda: engine.num_sequences == 0)
    second = ScriptedTarget(ATTACHED)
    await second.start(first.port)
    conversation = await second.conversation()
    conversation.tell(opened=_opened(1, 1, 2, 3))
    (candidate,) = await conversation.hear_candidates()
    assert candidate.committed_token_count == 3
    client.detach()
    await asyncio.wait_for(run, WAIT_S)
    await second.stop()


async def test_a_refusal_is_shown_and_tried_again_slowly(
    engine: DraftEngine, caplog: pytest.LogCaptureFixture
) -> None:
    target = ScriptedTarget(ATTACHED, FailedPrecondition.tokenizer_mismatch("abab", "cdcd"))
    await target.start()
    client = _client(target, engine)
    run = asyncio.create_task(client.run())
    for _ in range(2):
        await asyncio.wait_for(target.attaches.get(), WAIT_S)
    await _until(lambda: client.status.last_error is not None)
    assert client.status.last_error is not None
    assert "TOKENIZER_MISMATCH" in client.status.last_error
    assert "cdcd" in client.status.last_error
    assert any(record.levelname == "ERROR" for record in caplog.records)
    client.detach()
    await asyncio.wait_for(run, WAIT_S)
    await target.stop()


async def test_an_unknown_verification_mode_is_not_worked_under(engine: DraftEngine) -> None:
    terms = pb.Attached(attachment_id="a", max_node_count=8, max_sequence_count=5, vocab_size=9)
    target = ScriptedTarget(terms)
    await target.start()
    client = _client(target, engine)
    run = asyncio.create_task(client.run())
    await _until(lambda: client.status.last_error is not None)
    assert client.status.last_error is not None
    assert client.status.last_error.startswith("VERIFICATION_MODE_UNKNOWN")
    client.detach()
    await asyncio.wait_for(run, WAIT_S)
    await target.stop()


@pytest.mark.parametrize(
    "break_protocol",
    [
        lambda talk: talk.tell(verdicts=pb.VerdictBatch(sequence_ids=[1])),
        lambda talk: talk.tell(attached=ATTACHED),
        lambda talk: talk.tell(feature_chunk=pb.FeatureChunk(sequence_id=1)),
    ],
    ids=["verdict without outcome", "attached twice", "features without shape"],
)
async def test_a_malformed_message_ends_the_stream(
    target: ScriptedTarget,
    client: AttachClient,
    break_protocol: Callable[[Conversation], None],
) -> None:
    break_protocol(await target.conversation())
    assert await target.conversation(), "and it attaches again"


async def test_detaching_ends_the_stream_from_the_drafts_side(
    target: ScriptedTarget, engine: DraftEngine
) -> None:
    client = _client(target, engine)
    run = asyncio.create_task(client.run())
    conversation = await target.conversation()
    client.detach()
    assert await conversation.hear() is None
    await asyncio.wait_for(run, WAIT_S)
    assert client.status == LinkStatus(target.address)


async def test_a_target_that_does_not_read_is_detached_from(
    target: ScriptedTarget, engine: DraftEngine
) -> None:
    client = _client(target, engine, max_waiting_requests=0)
    run = asyncio.create_task(client.run())
    conversation = await target.conversation()
    conversation.tell(opened=_opened(1, 1, 2))
    await _until(lambda: client.status.last_error is not None)
    assert client.status.last_error is not None
    assert client.status.last_error.startswith("QUEUE_FULL")
    client.detach()
    await asyncio.wait_for(run, WAIT_S)


async def test_one_engine_serves_several_targets(engine: DraftEngine) -> None:
    targets = [ScriptedTarget(ATTACHED), ScriptedTarget(ATTACHED)]
    for target in targets:
        await target.start()
    clients = [_client(target, engine) for target in targets]
    runs = [asyncio.create_task(client.run()) for client in clients]
    talks = [await target.conversation() for target in targets]
    for number, talk in enumerate(talks):
        talk.tell(opened=_opened(1, *range(1, 4 + number)))
    for number, talk in enumerate(talks):
        (candidate,) = await talk.hear_candidates()
        assert candidate.committed_token_count == 3 + number
    for client in clients:
        client.detach()
    await asyncio.gather(*runs)
    for target in targets:
        await target.stop()


def test_delays_double_up_to_the_longest_with_jitter() -> None:
    backoff = Backoff(first_s=0.1, longest_s=5.0, generator=random.Random(0))
    delays = [backoff.next_s() for _ in range(40)]
    for number, delay in enumerate(delays):
        longest = min(0.1 * 2**number, 5.0)
        assert longest / 2 <= delay <= longest
    assert len(set(delays)) == len(delays)
    assert 2.5 <= backoff.slow_s() <= 5.0
    backoff.reset()
    assert backoff.next_s() <= 0.1
