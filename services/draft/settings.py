"""Settings of a draft process. Flags keep the names SGLang's users know."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.draft.likely_verdicts import MAX_BUDGET
from services.draft.settings_problems import (
    CHAIN_SHAPE,
    DEMO_TARGET,
    MAX_TREE_DEPTH,
    GivenShape,
    completed,
    completed_ngram,
    default_model_folder,
    has_next_token_layers,
    missing_model,
    model_shape,
    settings_problems,
)
from shared.errors import raise_problems
from shared.hub import with_local_models
from shared.model_options import (
    BACKEND_SYNONYMS,
    DTYPE_SYNONYMS,
    AttentionBackend,
    Dtype,
    LoadFormat,
    ModelOptions,
    Quantisation,
)
from shared.ngram import MatchType, NgramOptions
from shared.settings import DialingSettings, is_loopback, load_settings, setting
from shared.tokens import TreeShape

MOST_PAGE_TOKENS = 256


class AttentionMode(enum.Enum):
    """How SGLang's drafts compute committed tokens: as a prefill or row by row."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(DialingSettings):
    """All settings of a draft; the flags' help texts describe them."""

    target: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "HOST:PORT of a target to dial, or unix:PATH; repeat for several"
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(50061, "port of DraftService", minimum=0, maximum=65535)
    maintenance_host: str = setting("127.0.0.1", "address of AdminService")
    maintenance_port: int | None = setting(
        None, "port of AdminService; the port plus one when unset", minimum=0, maximum=65535
    )
    metrics_port: int | None = setting(
        None, "port of Prometheus metrics; none when unset", minimum=0, maximum=65535
    )
    exit_when_refused: bool = setting(
        False, "exit when every target has refused this draft permanently, instead of retrying"
    )
    worker_id: str | None = setting(None, "name of this worker; generated when unset")
    speculative_algorithm: Algorithm = setting(
        Algorithm.STANDALONE, "drafter", aliases=("speculative-algo", "algorithm")
    )
    speculative_draft_model_path: Path | None = setting(
        None,
        "draft model or head: a Hugging Face folder, or its id on the Hub; unset: the target's own "
        "next-token layers, or the demo's draft for the demo model",
        aliases=("speculative-draft-model", "speculative-draft", "draft-model"),
        is_model=True,
    )
    speculative_draft_model_revision: str | None = setting(
        None, "branch, tag or commit of a draft model that is an id on the Hub"
    )
    speculative_draft_load_format: LoadFormat = setting(
        LoadFormat.AUTO, "auto prefers safetensors to pt, which is pytorch_model.bin"
    )
    speculative_draft_model_quantization: Quantisation | None = setting(
        None,
        "quantise the draft's weights to 8 bits, but not its embedding or a target's lm_head; "
        "unset: fp8 for a dense draft in 16 bits on compute capability 9.0 or above",
    )
    speculative_attention_mode: AttentionMode = setting(
        AttentionMode.PREFILL,
        "no effect: one kernel serves prefill, decode and trees",
    )
    speculative_draft_attention_backend: AttentionBackend = setting(
        AttentionBackend.AUTO,
        "auto: triton on CUDA, else torch; SGLang's fa3, flashinfer and the like are taken as auto",
        synonyms=BACKEND_SYNONYMS,
    )
    speculative_draft_window_size: int | None = setting(
        None,
        "most committed tokens that the draft attends to; its context when unset",
        aliases=("speculative-dflash-draft-window-size",),
        minimum=64,
    )
    enable_cuda_graph: bool | None = setting(
        None,
        "capture drafting as CUDA graphs; needs CUDA; unset: if there is CUDA",
    )
    target_model_path: Path | None = setting(
        None,
        "target that a draft head belongs to: a folder, or its id on the Hub; the demo target's "
        "when unset",
        is_model=True,
    )
    speculative_token_map: Path | None = setting(
        None,
        "restrict an EAGLE head to the token ids of this file (.pt, .safetensors or .json); on the "
        "Hub OWNER/MODEL/FILE",
        is_model=True,
    )
    speculative_num_steps: int | None = setting(
        None,
        "depth of trees; setting it, or the number of draft tokens, pins the shape",
        minimum=1,
        maximum=MAX_TREE_DEPTH,
    )
    speculative_eagle_topk: int | None = setting(
        None,
        "children of each node, and nodes kept on each level; 1 is a chain",
        minimum=1,
        maximum=16,
    )
    speculative_num_draft_tokens: int | None = setting(
        None, "tree rows verified in a round, root included", minimum=2, maximum=257
    )
    speculative_outcome_budget: int | None = setting(
        None,
        "outcomes per sequence to prepare pushed trees for during verification; "
        "unset: 8 for STANDALONE on a GPU with a target on another host, else 0",
        minimum=0,
        maximum=MAX_BUDGET,
    )
    speculative_dflash_block_size: int | None = setting(
        None, "rows of a DFLASH block; the checkpoint's when unset", minimum=2, maximum=33
    )
    speculative_ngram_min_bfs_breadth: int = setting(
        1, "continuations of the longest match", minimum=1, maximum=16
    )
    speculative_ngram_max_bfs_breadth: int = setting(
        10, "continuations of the shortest match, and children of a node", minimum=1, maximum=16
    )
    speculative_ngram_match_type: MatchType = setting(
        MatchType.BFS, "BFS grows trees by recency, PROB by frequency"
    )
    speculative_ngram_max_trie_depth: int = setting(
        18, "tokens of the longest n-gram, context included", minimum=2, maximum=64
    )
    speculative_ngram_capacity: int = setting(
        10_000_000, "n-grams kept; the oldest make way", minimum=64
    )
    speculative_ngram_corpus_path: Path | None = setting(
        None, "text (.txt) or JSON lines (.jsonl) of texts or token ids to draft from"
    )
    tokenizer: Path | None = setting(
        None,
        "folder of the target's tokenizer, or its id on the Hub; the model's when unset",
        is_model=True,
    )
    dtype: Dtype = setting(
        Dtype.AUTO,
        "auto: the checkpoint's on a GPU, float32 on a CPU",
        synonyms=DTYPE_SYNONYMS,
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    tp_size: int = setting(
        1,
        "GPUs that share a STANDALONE draft's model (tensor parallelism), from the device on",
        aliases=("tp", "tensor-parallel-size"),
        minimum=1,
        maximum=64,
    )
    num_threads: int = setting(1, "CPU threads of a forward", minimum=1)
    page_size: int = setting(16, "tokens a KV page", minimum=1, maximum=MOST_PAGE_TOKENS)
    context_length: int | None = setting(
        None,
        "longest context of the draft; of longer sequences it reads the last tokens",
        minimum=64,
    )
    max_running_requests: int = setting(64, "most sequences drafted for at once", minimum=1)
    max_total_tokens: int | None = setting(
        None, "tokens in the KV cache; as many as fit when unset", minimum=64
    )
    mem_fraction_static: float | None = setting(
        None,
        "share of free memory for the KV cache; automatic when unset",
        aliases=("mem-fraction",),
        minimum=0.01,
        maximum=1.0,
    )
    disable_radix_cache: bool = setting(False, "disable the prefix cache")
    chunked_prefill_size: int = setting(
        512, "most prompt tokens computed between two rounds", minimum=16
    )

    def __post_init__(self) -> None:
        raise_problems(settings_problems(self))

    @property
    def admin_port(self) -> int:
        """The maintenance port, or its default."""
        if self.maintenance_port is not None:
            return self.maintenance_port
        return self.port + 1 if self.port else 0

    @property
    def algorithm(self) -> Algorithm:
        """The resolved algorithm. EAGLE and NEXTN without a named head are the target's next-token
        layers, where it has any."""
        if self.speculative_algorithm not in (Algorithm.EAGLE, Algorithm.NEXTN):
            return self.speculative_algorithm
        has_own_head = self.speculative_draft_model_path is not None or self.is_of_demo
        if has_own_head or not has_next_token_layers(self.target_folder):
            return Algorithm.EAGLE
        return Algorithm.MTP

    @property
    def is_of_demo(self) -> bool:
        """Whether the target is the demo's, for which the demo has drafts."""
        return self.target_folder.resolve() == DEMO_TARGET.resolve()

    @property
    def model_folder(self) -> Path:
        """Folder of the drafter's model; only for drafters that have one."""
        if self.speculative_draft_model_path is not None:
            return self.speculative_draft_model_path
        return default_model_folder(self.algorithm, self.target_folder)

    @property
    def target_folder(self) -> Path:
        """Folder of the target that a draft head belongs to."""
        return self.target_model_path or DEMO_TARGET

    @property
    def target_tokenizer(self) -> Path | None:
        """Folder of the target's tokenizer, if one is set."""
        return self.tokenizer or self.target_model_path

    @property
    def has_distant_target(self) -> bool:
        """Whether the address of a target is none that only this host has."""
        hosts = [address.rpartition(":")[0].strip("[]") for address in self.target]
        return not all(host in ("localhost", "unix") or is_loopback(host) for host in hosts)

    @property
    def given_shape(self) -> GivenShape:
        """Steps, topk and tokens; None where a setting is unset."""
        return (
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )

    @property
    def is_shape_pinned(self) -> bool:
        """Whether trees keep the shape that is set, whatever targets request. A topk alone
        leaves the depth open."""
        steps, _, tokens = self.given_shape
        return steps is not None or tokens is not None

    @property
    def shape(self) -> TreeShape:
        """The live shape at start: the one that is set, else the algorithm's default.

        Raises:
            CheckpointError: a head's default depends on its target, whose config is not readable.
        """
        given = self.given_shape
        if self.algorithm is Algorithm.NGRAM:
            return completed_ngram(
                given,
                self.speculative_ngram_max_trie_depth,
                self.speculative_ngram_max_bfs_breadth,
            )
        if None not in given:
            return completed(given, CHAIN_SHAPE, is_block=self.algorithm is Algorithm.DFLASH)
        default = model_shape(
            self.algorithm,
            self.model_folder,
            self.target_folder,
            block_size=self.speculative_dflash_block_size,
        )
        return completed(given, default, is_block=self.algorithm is Algorithm.DFLASH)

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(
            load_format=self.speculative_draft_load_format,
            quantisation=self.speculative_draft_model_quantization or Quantisation.UNQUANT,
            quantises_lm_head=True,
            attention_backend=self.speculative_draft_attention_backend,
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
    """Reads flags and environment; fetches models that are named by a Hub id.

    Raises:
        SettingsError: names every bad setting.
    """
    return checked_models(
        load_settings(DraftSettings, service="draft", arguments=arguments, env=os.environ)
    )


def checked_models(settings: DraftSettings) -> DraftSettings:
    """Returns the settings with local paths in place of Hub ids.

    Raises:
        SettingsError: a model cannot be fetched, or the algorithm needs one and none is named.
    """
    revision = {"speculative_draft_model_path": "speculative_draft_model_revision"}
    local = with_local_models(settings, revision)
    raise_problems(missing_model(local))
    return local
