"""Settings of the whole suite."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared.tls import CertFolder


# oneDNN compiles each product for each number of rows, in a millisecond, and keeps 1,024 of them
# unless told otherwise before torch is imported; the many small models here need more.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread a process: xdist workers must not fight for the cores. Examples of
    properties have no deadline: on a busy machine any takes a second now and then.

    With TESTS_IN_SESSIONS each worker is a session of its own, see `.ci/run`.
    """
    if os.environ.get("TESTS_IN_SESSIONS") and hasattr(config, "workerinput"):
        os.setsid()
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("suite")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from shared.kernels.kernel_settings import IS_INTERPRETING

    torch.set_num_threads(1)
    if IS_INTERPRETING:
        from tests.helpers.interpreter import look_up_once

        look_up_once()


# No garbage is collected until tests are: what is imported stays, and looking through it again and
# again took a tenth of the time.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects garbage from here on."""
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collections, which took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionstart() -> None:
    """One gRPC completion queue a process: it would go with the last channel of a test, and its
    end waits, uninterruptibly, for the events of calls that were cancelled."""
    if importlib.util.find_spec("grpc") is not None:
        from grpc import aio

        aio.init_grpc_aio()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where there is no CUDA device, and says so."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    from shared.kernels.kernel_settings import IS_INTERPRETING

    if IS_INTERPRETING:
        _skip(filter(_has_bfloat16, gpu_items), "Triton's interpreter cuts bfloat16 off")
    elif not torch.cuda.is_available():
        _skip(gpu_items, "needs a CUDA device")


def _has_bfloat16(item: pytest.Item) -> bool:
    import torch

    case = getattr(item, "callspec", None)
    return case is not None and torch.bfloat16 in case.params.values()


def _skip(items: Iterable[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> CertFolder:
    """An authority with a server's and a client's certificate."""
    from services.certs import write_certs

    return write_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="session")
def other_certs(tmp_path_factory: pytest.TempPathFactory) -> CertFolder:
    """The same from an authority that nobody trusts."""
    from services.certs import write_certs

    return write_certs(tmp_path_factory.mktemp("other-certs"))
