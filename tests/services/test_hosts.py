"""Hosts of a model find each other, agree, and hear of each other's end."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from services import hosts
from services.followers import end_processes
from services.hosts import HostLinks, Terms, await_hosts, join_hosts, open_store
from services.ranks import Ranks
from services.target.__main__ import read_settings
from services.target.engine_factory import build_runner
from services.target.tensor_parallel import start_followers
from shared.errors import SettingsError
from shared.tokens import SamplingParams, StopParams
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.engines import VOCAB_SIZE, engine_over, leases_over, request, run
from tests.helpers.followers import follower_of
from tests.helpers.serving import free_ports

TERMS = Terms("word", {"--page-size": "16"})
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [3] * 40)


def _address() -> str:
    return f"127.0.0.1:{next(free_ports(1))}"


class _Meeting:
    """Three hosts of two processes each, as threads that meet at an address."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.ranks = Ranks(2, 3, 3, 0, _address())
        self._store = open_store(self.ranks.address, self.ranks.size, is_first=True)

    @property
    def port(self) -> int:
        """The port on which the first host listens."""
        # A store that waits for a key takes none from another thread meanwhile.
        store = open_store(self.ranks.address, self.ranks.size, is_first=False)
        return int(json.loads(store.get("outrider/hosts"))["port"])

    def first(self, terms: Terms = TERMS) -> Future[list[HostLinks]]:
        return self._threads.submit(await_hosts, self.ranks, self._store, terms)

    def other(self, host: int, terms: Terms = TERMS) -> Future[HostLinks]:
        def join() -> HostLinks:
            store = open_store(self.ranks.address, self.ranks.size, is_first=False)
            return join_hosts(replace(self.ranks, host=host), store, terms)

        return self._threads.submit(join)


@pytest.fixture
def meeting() -> Iterator[_Meeting]:
    with ThreadPoolExecutor(4) as threads:
        yield _Meeting(threads)


@pytest.mark.parametrize("secret", ["word", None])
def test_each_process_of_a_host_has_a_pipe(meeting: _Meeting, secret: str | None) -> None:
    terms = replace(TERMS, secret=secret)
    first = meeting.first(terms)
    others = [meeting.other(host, terms).result() for host in (2, 1)]
    second, third = first.result()
    assert [[*each.pipes] for each in (second, third)] == [[2, 3], [4, 5]]
    assert second.name == "--node-rank 1 (127.0.0.1)"
    third.pipes[5].send("to rank 5")
    assert others[0].pipes[5].recv() == "to rank 5"
    assert not others[0].was_dismissed(0.0)
    third.dismiss()
    second.control.close()
    assert [each.was_dismissed(10.0) for each in others] == [True, False]
    third.control.close()
    third.dismiss()  # to nobody


@pytest.mark.parametrize("secret", ["another", None])
def test_a_host_without_the_word_does_not_come_in(meeting: _Meeting, secret: str | None) -> None:
    first = meeting.first()
    with pytest.raises(SettingsError, match=r"--dist-secret is not that of 127\.0\.0\.1:\d+"):
        meeting.other(1, replace(TERMS, secret=secret)).result()
    assert not first.done()
    assert [meeting.other(host).result().name for host in (1, 2)]
    assert len(first.result()) == 2


def test_who_hangs_up_or_is_silent_is_no_host(
    meeting: _Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hosts, "_CALLER_TIMEOUT", struct.pack("ll", 0, 1_000))
        first = meeting.first()
        place = "127.0.0.1", meeting.port
        socket.create_connection(place).close()
        with socket.create_connection(place) as silent:
            while silent.recv(1_000):
                """What it is asked, until nobody waits for its answer."""
    for host in (1, 2):
        meeting.other(host).result()
    assert len(first.result()) == 2


def test_hosts_that_do_not_agree_are_told_where(meeting: _Meeting) -> None:
    first = meeting.first()
    meeting.other(1, replace(TERMS, settings={"--page-size": "32", "--dtype": "auto"}))
    message = (
        "--dtype is None here and 'auto' on --node-rank 1 (127.0.0.1); hosts take the same "
        "command line but for --node-rank"
    )
    with pytest.raises(SettingsError) as raised:
        first.result()
    assert raised.value.problems[0] == message
    assert "--page-size is '16' here and '32' on" in raised.value.problems[1]


def test_a_host_that_is_there_twice_is_refused(meeting: _Meeting) -> None:
    first = meeting.first()
    for _ in range(2):
        meeting.other(1)
    with pytest.raises(SettingsError, match="two hosts say that they are --node-rank 1"):
        first.result()


def test_hosts_that_do_not_come_are_named(
    meeting: _Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LIMIT_S", 0.01)
    message = r"--node-rank 1, 2 of --nnodes 3 did not come to 127\.0\.0\.1:\d+ within 0\.01 s"
    with pytest.raises(SettingsError, match=message):
        meeting.first().result()


def test_an_address_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = _address()
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        with pytest.raises(SettingsError, match="which cannot be listened on"):
            open_store(address, 2, is_first=True)
    monkeypatch.setattr(hosts, "LIMIT_S", 0.2)
    with pytest.raises(SettingsError, match="does not answer as the first host would"):
        open_store(address, 2, is_first=False)
    ranks = Ranks(2, 1, 2, 0, "192.0.2.1:5000")  # of documentation, nobody's
    store = open_store(None, 2, is_first=True)
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1:5000, which is no address of this host"):
        await_hosts(ranks, store, TERMS)


SIZES = (
    *("--max-total-tokens", "512", "--page-size", "4", "--chunked-prefill-size", "16"),
    *("--dtype", "float32"),
)


def _flags(folder: Path, address: str) -> list[str]:
    return [
        *("--model-path", str(folder), "--tp-size", "2", "--pp-size", "2", "--device", "cpu"),
        *("--nnodes", "2", "--dist-init-addr", address, "--dist-secret", "word", "--port", "0"),
        *SIZES,
    ]


@contextmanager
def _target(
    flags: Sequence[str], more_environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    command, environ = [sys.executable, "-m", "services.target", *flags], os.environ | more_environ
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def _write(folder: Path, num_layers: int = 3) -> Path:
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=num_layers)
    return write_checkpoint(folder, shape=shape, with_tokenizer=True)


SEQUENCES = "--pp-size 1 --tp-size 4 --dp-size 4 --enable-dp-attention"


@pytest.mark.parametrize("spread", ["", SEQUENCES], ids=["stages", "sequences"])
def test_two_hosts_write_what_one_process_writes(spread: str, tmp_path: Path) -> None:
    _check(_write(tmp_path), spread.split(), "ranks 2 to 3 follow the first host")


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    "spread", ["--tp-size 2 --pp-size 1", "--tp-size 1"], ids=["heads", "stages"]
)
def test_two_hosts_of_a_gpu_each_write_what_one_writes(
    spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing here uses NVLink multicast, and on some hosts it must not even be set up.
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = "ranks 1 to 1 follow the first host"
    process = multiprocessing.get_context("spawn").Process(
        target=_check, args=(_write(tmp_path), spread.split(), words, "cuda", "1")
    )
    process.start()
    end_processes([process], 180.0)
    assert process.exitcode == 0


def _check(
    folder: Path, spread: Sequence[str], words: str, device: str = "cpu", other_gpu: str = ""
) -> None:
    """Holds a target on two hosts to one in this process.

    Args:
        spread: flags.
        words: of the other host's log.
        other_gpu: that it sees.
    """
    flags = [*_flags(folder, _address()), *spread, "--device", device]
    whole = [*flags[:2], *flags[-2:], *SIZES]
    requests = [
        request(prompt, SamplingParams(temperature=0.8, seed=3), StopParams(24))
        for prompt in (*PROMPTS, *PROMPTS)  # some have a prefix that is cached
    ]
    found = []
    gpus = {"CUDA_VISIBLE_DEVICES": other_gpu}
    with _target([*flags, "--node-rank", "1"], gpus) as other:
        settings, _ = read_settings(flags, {})
        followers = start_followers(settings)
        try:
            cut = build_runner(settings, followers.group, followers.leader).runner
            for runner in (cut, build_runner(read_settings(whole, {})[0]).runner):
                leases = leases_over(runner.pool)
                collector = run(engine_over(runner, leases, max_context_tokens=120), requests)
                found.append([collector.token_ids(key) for key in range(len(requests))])
        finally:
            followers.stop()
        assert found[0] == found[1]
        assert other.wait(60) == 0, "rank 0 has ended in order"
        assert other.stderr is not None
        assert words in other.stderr.read()


def _until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), words


@pytest.mark.skipif(sys.platform != "linux", reason="finds the follower in /proc")
@pytest.mark.parametrize("victim", ["first host", "other host", "process of the other host"])
def test_hosts_do_not_outlive_each_other(victim: str, tmp_path: Path) -> None:
    address = _address()
    flags = [*_flags(_write(tmp_path), address), "--pp-size", "1"]
    with _target(flags) as first, _target([*flags, "--node-rank", "1"]) as other:
        _until(first, "phase=serving")
        process_ids = {"first host": first.pid, "other host": other.pid}
        os.kill(process_ids.get(victim) or follower_of(other.pid), signal.SIGKILL)
        messages = [process.communicate(timeout=60)[1] for process in (first, other)]
    if victim == "first host":
        assert other.returncode == 1
        assert f"the first host, {address} died; without its part of the model" in messages[1]
        return
    assert first.returncode == 1
    found = re.search(r"CRITICAL (.*) died; without its part of the model this target", messages[0])
    assert found is not None
    assert "--node-rank 1 (127.0.0.1)" in found[1]
    if victim == "process of the other host":
        assert other.returncode == 1
        assert "target-1 died; without its part of the model" in messages[1]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the follower in /proc")
def test_a_host_that_is_told_to_stop_gives_the_first_one_time(tmp_path: Path) -> None:
    flags = [*_flags(_write(tmp_path), _address()), "--pp-size", "1"]
    with _target(flags) as first, _target([*flags, "--node-rank", "1"]) as other:
        _until(first, "phase=serving")
        other.send_signal(signal.SIGTERM)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert other.wait(60) == 0
