"""A stack with several targets or drafts: who has which port and GPU, and who dials whom."""

from __future__ import annotations

from services.serve_plan import make_plan
from services.stack import Part
from tests.bench.wide_serve import parts

FLAGS = ("--speculative-algorithm", "STANDALONE", "--placement", "remote", "--target-port", "6000")


def _words(part: Part) -> list[str]:
    return list(part.child.spec.arguments)


def test_one_draft_and_one_gateway_dial_all_targets() -> None:
    plan = make_plan([*FLAGS, "--model-path", "shared/demo/target"], {}, num_gpus=4)
    stack = parts(3, 1, plan)
    names = [part.child.spec.name for part in stack]
    assert names == ["target", "target-1", "target-2", "draft", "gateway"]
    first, second, third, draft, gateway = map(_words, stack)
    assert {"--port=6010", "--device=cuda:1"} <= set(second)
    assert {"--port=6020", "--device=cuda:2"} <= set(third)
    # Each has its own: no port is said twice.
    ports = [word for words in (second, third) for word in words[-4:] if "port=" in word]
    assert len({*ports}) == 6
    dialled = [f"--target=127.0.0.1:{port}" for port in (6010, 6020)]
    assert [word for word in gateway if word in dialled] == dialled
    assert [word for word in draft if word in dialled] == dialled
    assert draft[-1] == "--device=cuda:3"
    assert not any("cuda:" in word for word in first)


def test_equal_drafts_dial_one_target_from_ports_and_gpus_of_their_own() -> None:
    plan = make_plan([*FLAGS, "--model-path", "shared/demo/target"], {}, num_gpus=4)
    stack = parts(1, 2, plan)
    assert [part.child.spec.name for part in stack] == ["target", "draft", "draft-1", "gateway"]
    _, first, second, _ = map(_words, stack)
    assert first[-1] == "--device=cuda:1"
    assert second[-3].startswith("--device=cuda:2")
    assert len({word for word in (*first, *second) if "port=" in word}) >= 2
    for draft in (first, second):
        assert "--target=127.0.0.1:6000" in draft
