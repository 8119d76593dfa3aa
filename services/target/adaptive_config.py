"""The tree depths that may be chosen, by batch size.

The file of `--speculative-adaptive-config` has SGLang's keys: batch sizes, each with its
`candidate_steps`, or one `candidate_steps` for every batch size. A step count of 0 allows plain
steps. Keys of SGLang's own rules (hysteresis, averages, profiles) are accepted without effect: the
target chooses by measurements while it serves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.errors import SettingsError, raise_problems
from shared.sampling_defaults import TREE_STEPS, TREE_TOKENS
from shared.tokens import TreeShape

MAX_STEPS = TREE_STEPS.highest
MAX_DRAFT_TOKENS = TREE_TOKENS.highest
DEFAULT_STEPS = (0, 1, 2, 3, 5, 7)
STEPS_AHEAD, MAX_STEPS_AHEAD = (2, 4, 7), 10
"""Where a draft drafts ahead: steps that chains may have beyond its own, and most steps in all."""
LANES_OF_DEEPEST = 4
"""Most sequences in rounds of the deepest of these chains. Only a few such chains are verified in
about the time of a plain step."""
_WITHOUT_EFFECT = frozenset(
    {
        *("ema_alpha", "update_interval", "warmup_batches"),
        *("strategy", "up_hysteresis", "down_hysteresis", "ceiling_coeff", "window_size"),
        *("profile_run_batch_sizes", "max_profile_run_batch_size", "profile_run_seq_len"),
        *("profile_run_n_warmup", "profile_run_n_measure"),
    }
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Choices for one range of batch sizes.

    Attributes:
        steps: depths of trees, ascending. None: depths around the draft's own. Empty: only plain
            steps.
        may_pause: sequences may go without trees.
    """

    steps: tuple[int, ...] | None = None
    may_pause: bool = True

    def shapes(self, base: TreeShape) -> tuple[TreeShape, ...]:
        """Returns the tree shapes that may be requested of a draft.

        Each keeps the top-k of the draft's own shape, `base`, and scales its number of nodes with
        the depth. A draft whose own trees branch may be asked for chains as well.
        """
        return _shapes(base, self.steps)

    def round_shapes(self, base: TreeShape, *, drafts_ahead: bool = False) -> tuple[TreeShape, ...]:
        """Returns the tree shapes of device rounds. Where depths are set these are `shapes`; else
        the draft's own, and chains that are as deep, half as deep and of one step. Each shape needs
        CUDA graphs of its own, so there are few.

        Args:
            drafts_ahead: chains may grow while the chains before them are verified. Then a few more
                steps cost no time; the larger the target beside the draft, the more steps.
        """
        if self.steps is not None:
            return self.shapes(base)
        deepest = min(base.num_steps, base.max_node_count)
        deeper = {deepest + more for more in STEPS_AHEAD if deepest + more <= MAX_STEPS_AHEAD}
        depths = {1, deepest, *(deeper if drafts_ahead and deeper else {-(-deepest // 2)})}
        base_depth = deepest if base.topk == 1 else None  # `base` is this chain
        return (base, *map(chain, sorted(depths - {base_depth}, reverse=True)))


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """Candidates by batch size: the largest key that is not above the size counts.

    Attributes:
        by_batch: at least one entry.
    """

    by_batch: Mapping[int, Candidates]

    def candidates(self, num_sequences: int) -> Candidates:
        """Returns the candidates for a batch."""
        fitting = [size for size in self.by_batch if size <= num_sequences]
        return self.by_batch[max(fitting, default=min(self.by_batch))]

    def shapes(self, base: TreeShape) -> tuple[TreeShape, ...]:
        """Returns the tree shapes that may be requested at any batch size, besides the draft's
        own."""
        shapes = {
            shape for candidates in self.by_batch.values() for shape in candidates.shapes(base)
        }
        return tuple(sorted(shapes - {base}, key=_depth_and_topk))

    def round_shapes(self, base: TreeShape, *, drafts_ahead: bool = False) -> tuple[TreeShape, ...]:
        """Returns the tree shapes of rounds at any batch size, the draft's own first."""
        shapes = {
            shape
            for candidates in self.by_batch.values()
            for shape in candidates.round_shapes(base, drafts_ahead=drafts_ahead)
        }
        largest_first = sorted(shapes - {base}, key=_depth_and_topk, reverse=True)
        has_base = base in shapes or not largest_first
        return (base, *largest_first) if has_base else tuple(largest_first)

    def most_lanes(self, shape: TreeShape, base: TreeShape) -> int | None:
        """Returns the most sequences in rounds of a shape, for a draft whose own shape is `base`;
        None if the shape has no such limit."""
        is_deepest = shape == chain(base.num_steps + STEPS_AHEAD[-1])
        is_default = any(candidates.steps is None for candidates in self.by_batch.values())
        return LANES_OF_DEEPEST if is_deepest and is_default else None


DEFAULT_CONFIG = AdaptiveConfig({1: Candidates()})
ALWAYS_TREES = AdaptiveConfig({1: Candidates(may_pause=False)})


def chain(num_steps: int) -> TreeShape:
    """Returns the shape of a chain."""
    return TreeShape(num_steps, 1, num_steps + 1)


@lru_cache(maxsize=64)  # the policy asks in every turn
def _shapes(base: TreeShape, given: tuple[int, ...] | None) -> tuple[TreeShape, ...]:
    steps = _steps_around(base) if given is None else given
    shapes = {shape_of(base, depth) for depth in steps}
    if base.topk > 1:
        shapes |= {chain(depth) for depth in steps}
    return tuple(sorted(shapes, key=_depth_and_topk))


def _depth_and_topk(shape: TreeShape) -> tuple[int, int]:
    return shape.num_steps, shape.topk


def shape_of(base: TreeShape, num_steps: int) -> TreeShape:
    """Returns a draft's own shape at another depth."""
    if base.topk == 1:
        return chain(num_steps)
    num_nodes = max(num_steps, round((base.num_draft_tokens - 1) * num_steps / base.num_steps))
    return TreeShape(num_steps, base.topk, min(num_nodes + 1, MAX_DRAFT_TOKENS))


def _steps_around(base: TreeShape) -> tuple[int, ...]:
    """Returns depths up to about twice the draft's own; it was not made for deeper trees."""
    deepest = min(2 * base.num_steps + 1, MAX_STEPS)
    return tuple(sorted({base.num_steps, *(s for s in DEFAULT_STEPS if 1 <= s <= deepest)}))


def read_adaptive_config(path: Path) -> AdaptiveConfig:
    """Reads the file of `--speculative-adaptive-config`.

    Raises:
        SettingsError: names every wrong key, its value and what it must be.
    """
    name = f"--speculative-adaptive-config {path}"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError((f"{name}: {error}",)) from None
    if not isinstance(content, dict):
        raise SettingsError((f"{name} holds {type(content).__name__}; it must be an object",))
    shared = {key: value for key, value in content.items() if not key.isdecimal()}
    sizes = {key: value for key, value in content.items() if key.isdecimal()} or {"1": {}}
    problems = [f"{name}: {problem}" for problem in _problems(shared)]
    by_batch = {}
    for key, entry in sizes.items():
        if isinstance(entry, dict):
            problems += [f"{name}: {key}: {problem}" for problem in _problems(entry)]
            by_batch[int(key)] = shared | entry
        else:
            problems.append(f"{name}: {key} is {entry!r}; it must be an object")
    raise_problems(problems)
    return AdaptiveConfig({size: _candidates(**entry) for size, entry in by_batch.items()})


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    known = {"candidate_steps", *_WITHOUT_EFFECT}
    for key in entry:
        if key not in known:
            yield f"{key} is unknown; known are {', '.join(sorted(known))}"
    steps = entry.get("candidate_steps", [0])
    allowed = range(MAX_STEPS + 1)
    if (
        not isinstance(steps, list)
        or not steps
        or any(type(depth) is not int or depth not in allowed for depth in steps)
    ):
        yield (
            f"candidate_steps is {steps!r}; it must be a list of whole numbers in [0, {MAX_STEPS}]"
        )


def _candidates(candidate_steps: list[int] | None = None, **_: object) -> Candidates:
    if candidate_steps is None:
        return Candidates()
    return Candidates(tuple(sorted({*candidate_steps} - {0})), may_pause=0 in candidate_steps)
