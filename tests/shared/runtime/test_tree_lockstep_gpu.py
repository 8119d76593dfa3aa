"""Passes of a draft that two processes hold, by Triton's kernels, grow the trees of one process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from services.bound import end_with_parent
from services.followers import end_processes
from shared.tokens import TreeShape
from tests.helpers.cut_drafts import check_ahead, check_trees, cut_draft
from tests.helpers.drafting import GREEDY, SAMPLED

SIZE, LIMIT_S = 2, 280.0
SAMPLINGS = [GREEDY, SAMPLED]
SHAPES = [TreeShape(4, 1, 5), TreeShape(3, 3, 9), TreeShape(2, 4, 30)]
pytestmark = pytest.mark.gpu


def grow(folder: Path) -> None:
    """Rank 0, in a process that may lead a group and be killed."""
    end_with_parent()
    with cut_draft(folder, "cuda:0") as draft:
        grower = draft.cut.grower
        assert grower is not None
        assert grower.limits.has_graphs
        for shape in SHAPES:
            check_trees(draft.twins(grows_whole=False), shape, SAMPLINGS)
            check_trees(draft.twins(), shape, SAMPLINGS)
            check_ahead(draft.twins(), shape)
            while grower.capture_next(shape):
                pass
            check_trees(draft.twins(), shape, SAMPLINGS)


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs")
def test_graphs_of_two_gpus_grow_the_trees_of_one(tmp_path: Path) -> None:
    # Nothing here uses NVLink multicast, and on some hosts it must not even be set up.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    process = multiprocessing.get_context("spawn").Process(target=grow, args=(tmp_path,))
    process.start()
    end_processes([process], LIMIT_S)
    assert process.exitcode == 0
