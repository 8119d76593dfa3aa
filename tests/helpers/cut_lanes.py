"""A target split over several processes, with a draft head in the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from services.ranks import Ranks
from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.engine import Engine
from services.target.engine_factory import build_runner
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from services.target.tensor_parallel import start_followers
from shared.kv.leases import KvLeases
from shared.model_options import Dtype
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import PAGE_SIZE, engine_over, leases_over
from tests.helpers.shared_head_rounds import SilentDraft, sharing_head, write_pair

TREE = TreeShape(3, 3, 9)
OTHER_TREES = {TreeShape(4, 1, 5): 8, TreeShape(1, 5, 6): 3}
NUM_PAGES = 200
TWO = Ranks(2)


@dataclass(frozen=True)
class CutTarget:
    """A target and its head in one process, and a runner of the target split over several."""

    whole: Pair
    runner: ModelRunner

    def plain(self) -> Engine:
        """Returns an engine over all processes, without drafts."""
        return engine_over(self.runner, self._leases(NUM_PAGES))

    def drafted(
        self,
        on_step: Callable[[StepReport], None],
        other_trees: Mapping[TreeShape, int] | None = None,
        num_pages: int = NUM_PAGES,
    ) -> Engine:
        """Returns an engine over all processes, with the head drafting for its lanes.

        Args:
            other_trees: further tree shapes; with them the policy chooses the shape.
            num_pages: pages that the engine may use, of each pool if processes have their own.
        """
        engine = engine_over(
            self.runner,
            self._leases(num_pages),
            on_step=on_step,
            adaptive=None if other_trees is None else DEFAULT_CONFIG,
        )
        is_pinned, trees = other_trees is None, other_trees or {}
        engine.attach(sharing_head(self.whole, SilentDraft(), TREE, trees, is_pinned=is_pinned))
        return engine

    def _leases(self, num_pages: int) -> KvLeases:
        pool = self.runner.pool
        return leases_over(pool, [num_pages] * pool.num_ranks)


@contextmanager
def cut_target(
    folder: Path, device: str, ranks: Ranks = TWO, *, spreads_sequences: bool = False
) -> Iterator[CutTarget]:
    """Writes a tiny target and a head to `folder` and loads them.

    Args:
        spreads_sequences: each process computes the attention of its own sequences, with all heads.
    """
    whole = write_pair(folder / "target", folder / "head", torch.device(device))
    settings = TargetSettings(
        model_path=folder / "target",
        device=device,
        dtype=Dtype.FLOAT32,
        tp_size=ranks.tp_size,
        pp_size=ranks.pp_size,
        enable_dp_attention=spreads_sequences,
        dp_size=ranks.tp_size if spreads_sequences else 1,
        page_size=PAGE_SIZE,
        max_total_tokens=(NUM_PAGES - 1) * PAGE_SIZE,
        context_length=200,
        cuda_graph_max_bs=8,
        max_tree_nodes=16,
    )
    followers = start_followers(settings)
    try:
        yield CutTarget(whole, build_runner(settings, followers.group, followers.leader).runner)
    finally:
        followers.stop()
