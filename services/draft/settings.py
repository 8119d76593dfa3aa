"""Settings of a draft process. Flags keep the names SGLang's users know."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.draft.drafters.ngram import MatchType, NgramOptions
from services.draft.shapes import CHAIN_SHAPE, NGRAM_DRAFT_TOKENS, head_shape
from shared.errors import SettingsError
from shared.settings import load_settings, setting
from shared.telemetry.logs import LogFormat
from shared.tokens import TreeShape

DEMO = Path(__file__).parents[2] / "shared" / "demo"
DEMO_DRAFT = DEMO / "draft"
DEMO_TARGET = DEMO / "target"
MAX_TREE_DEPTH = 32


class Algorithm(enum.Enum):
    """Drafters this worker has; NEXTN is another name of EAGLE."""

    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    EAGLE = "EAGLE"
    NEXTN = "NEXTN"
    EAGLE3 = "EAGLE3"

    @property
    def reads_features(self) -> bool:
        """Whether it is a head on the target's hidden states."""
        return self in (Algorithm.EAGLE, Algorithm.NEXTN, Algorithm.EAGLE3)


class Dtype(enum.Enum):
    """Type of weights and KV; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Everything that can be set; the flag's help says what each is."""

    target: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "address of a target to dial; repeat for several"
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(50061, "port of DraftService", minimum=0, maximum=65535)
    maintenance_host: str = setting("127.0.0.1", "address of AdminService")
    maintenance_port: int | None = setting(
        None, "port of AdminService; one above the port", minimum=0, maximum=65535
    )
    worker_id: str | None = setting(None, "name of this worker; made up when unset")
    speculative_algorithm: Algorithm = setting(Algorithm.STANDALONE, "drafter")
    speculative_draft_model_path: Path | None = setting(
        None, "folder of the draft model or head; the demo's when unset"
    )
    target_model_path: Path | None = setting(
        None, "folder of the target a draft head belongs to; the demo target's when unset"
    )
    speculative_token_map: Path | None = setting(
        None, "token ids an EAGLE head is confined to (.pt, .safetensors or .json)"
    )
    speculative_num_steps: int | None = setting(
        None, "depth of trees; set all three of a shape or none", minimum=1, maximum=MAX_TREE_DEPTH
    )
    speculative_eagle_topk: int | None = setting(
        None, "children of a node and nodes kept a level; 1 is a chain", minimum=1, maximum=16
    )
    speculative_num_draft_tokens: int | None = setting(
        None, "rows verified a round, the root included", minimum=2, maximum=257
    )
    speculative_ngram_min_bfs_breadth: int = setting(
        1, "children of a node after the longest match", minimum=1, maximum=16
    )
    speculative_ngram_max_bfs_breadth: int = setting(
        10, "children of a node after the shortest match", minimum=1, maximum=16
    )
    speculative_ngram_match_type: MatchType = setting(
        MatchType.BFS, "BFS grows trees by recency, PROB by frequency"
    )
    speculative_ngram_max_trie_depth: int = setting(
        18, "tokens of the longest n-gram, context included", minimum=2, maximum=64
    )
    speculative_ngram_capacity: int = setting(
        10_000_000, "n-grams kept; the least recent make way", minimum=64
    )
    speculative_ngram_corpus_path: Path | None = setting(
        None, "text (.txt) or JSON lines (.jsonl) of texts or token ids to draft from"
    )
    tokenizer: Path | None = setting(
        None, "folder whose tokenizer the target must share; the model's when unset"
    )
    dtype: Dtype = setting(Dtype.AUTO, "type of weights and KV")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    num_threads: int = setting(1, "CPU threads of a forward", minimum=1)
    page_size: int = setting(16, "tokens a KV page", minimum=1, maximum=256)
    context_length: int | None = setting(
        None, "longest context of the draft; longer sequences slide", minimum=64
    )
    max_running_requests: int = setting(64, "sequences held at most", minimum=1)
    max_total_tokens: int | None = setting(
        None, "tokens the KV pool holds; what memory allows when unset", minimum=64
    )
    mem_fraction_static: float | None = setting(
        None, "share of free memory for KV pages; automatic when unset", minimum=0.01, maximum=1.0
    )
    disable_radix_cache: bool = setting(False, "share no prompt prefixes between sequences")
    chunked_prefill_size: int = setting(
        512, "prompt tokens taken in between two rounds", minimum=16
    )
    log_level: str = setting("info", "debug, info, warning or error")
    log_format: LogFormat = setting(LogFormat.TEXT, "text or json")

    def __post_init__(self) -> None:
        problems = (
            *_shape_problems(self),
            *_ngram_problems(self),
            *_head_problems(self),
            *_other_problems(self),
        )
        if problems:
            raise SettingsError(problems)

    @property
    def admin_port(self) -> int:
        """The maintenance port, resolved."""
        if self.maintenance_port is not None:
            return self.maintenance_port
        return self.port + 1 if self.port else 0

    @property
    def algorithm(self) -> Algorithm:
        """The drafter's own name."""
        if self.speculative_algorithm is Algorithm.NEXTN:
            return Algorithm.EAGLE
        return self.speculative_algorithm

    @property
    def model_folder(self) -> Path:
        """Of a drafter that has a model."""
        if self.speculative_draft_model_path is not None:
            return self.speculative_draft_model_path
        return DEMO / self.algorithm.value.lower() if self.algorithm.reads_features else DEMO_DRAFT

    @property
    def target_folder(self) -> Path:
        """Of the target that a draft head belongs to."""
        return self.target_model_path or DEMO_TARGET

    @property
    def shape(self) -> TreeShape:
        """The live shape at start: what is set, else the algorithm's default.

        Raises:
            CheckpointError: a head's default depends on its target, whose config is not readable.
        """
        steps, topk, tokens = _given_shape(self)
        if steps is not None and topk is not None and tokens is not None:
            return TreeShape(steps, topk, tokens)
        if self.algorithm.reads_features:
            return head_shape(self.target_folder)
        if self.algorithm is Algorithm.STANDALONE:
            return CHAIN_SHAPE
        return TreeShape(
            num_steps=min(self.speculative_ngram_max_trie_depth - 1, MAX_TREE_DEPTH),
            topk=self.speculative_ngram_max_bfs_breadth,
            num_draft_tokens=tokens or NGRAM_DRAFT_TOKENS,
        )

    @property
    def ngram_options(self) -> NgramOptions:
        return NgramOptions(
            match_type=self.speculative_ngram_match_type,
            max_trie_depth=self.speculative_ngram_max_trie_depth,
            capacity=self.speculative_ngram_capacity,
            min_breadth=self.speculative_ngram_min_bfs_breadth,
        )


def read_settings(arguments: Sequence[str]) -> DraftSettings:
    """Reads flags and environment.

    Raises:
        SettingsError: names every bad setting.
    """
    return load_settings(DraftSettings, service="draft", arguments=arguments, env=os.environ)


def _given_shape(settings: DraftSettings) -> tuple[int | None, int | None, int | None]:
    return (
        settings.speculative_num_steps,
        settings.speculative_eagle_topk,
        settings.speculative_num_draft_tokens,
    )


def _shape_problems(settings: DraftSettings) -> tuple[str, ...]:
    given = _given_shape(settings)
    if all(value is None for value in given) or all(value is not None for value in given):
        return ()
    # The breadth of n-gram trees has flags of its own, and their depth is the trie's.
    if settings.speculative_algorithm is Algorithm.NGRAM and given[:2] == (None, None):
        return ()
    return (
        "set all of --speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens, or none of them",
    )


def _ngram_problems(settings: DraftSettings) -> tuple[str, ...]:
    if settings.speculative_algorithm is not Algorithm.NGRAM:
        return ()
    low = settings.speculative_ngram_min_bfs_breadth
    high = settings.speculative_ngram_max_bfs_breadth
    problems = []
    if low > high:
        problems.append(
            f"--speculative-ngram-min-bfs-breadth is {low}; it must not exceed "
            f"--speculative-ngram-max-bfs-breadth, {high}"
        )
    if settings.speculative_draft_model_path is not None:
        problems.append("--speculative-draft-model-path: NGRAM has no model")
    return tuple(problems)


def _head_problems(settings: DraftSettings) -> tuple[str, ...]:
    name = settings.speculative_algorithm.value
    if settings.speculative_algorithm.reads_features:
        return ()
    problems = []
    if settings.speculative_token_map is not None:
        problems.append(f"--speculative-token-map: {name} has no head to confine; EAGLE has")
    if settings.target_model_path is not None:
        problems.append(f"--target-model-path: {name} reads nothing of the target; EAGLE does")
    return tuple(problems)


def _other_problems(settings: DraftSettings) -> tuple[str, ...]:
    problems = []
    if settings.log_level.lower() not in ("debug", "info", "warning", "error"):
        problems.append(
            f"--log-level: {settings.log_level!r} is not one of debug, info, warning, error"
        )
    if settings.device != "auto" and not settings.device.startswith(("cpu", "cuda")):
        problems.append(f"--device: {settings.device!r} is not auto, cpu, cuda or cuda:N")
    if len(set(settings.target)) != len(settings.target) or not settings.target:
        problems.append("--target: give at least one address, and none twice")
    return tuple(problems)
