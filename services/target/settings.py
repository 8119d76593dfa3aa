"""Settings of the target. Flags that SGLang has, too, keep SGLang's names."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.ranks import Ranks
from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig, read_adaptive_config
from shared.errors import SettingsError, raise_problems
from shared.hub import shown_name, with_local_models
from shared.model_options import (
    BACKEND_SYNONYMS,
    DTYPE_SYNONYMS,
    AttentionBackend,
    Dtype,
    KvDtype,
    ModelOptions,
    Quantisation,
    device_problems,
)
from shared.settings import ServiceSettings, setting, tls_problems


class DeviceRoundsChoice(enum.Enum):
    """Whether rounds run on the device where they can."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class VerificationChoice(enum.Enum):
    """Whether draft and target share their randomness."""

    COUPLED = "coupled"
    POINT_MASS = "point-mass"


class DraftPlacement(enum.Enum):
    """Where drafts run."""

    REMOTE = "remote"
    EMBEDDED = "embedded"


class VerificationMode(enum.Enum):
    """The rule by which trees are verified."""

    COUPLED = "coupled"
    POINT_MASS = "point-mass"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def draws_chains(self) -> bool:
        """Whether drafts sample their chains and hand over the draft distributions."""
        return self in (VerificationMode.REJECTION, VerificationMode.BLOCK)


DEMO_MODEL = Path(__file__).parents[2] / "shared" / "demo" / "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(ServiceSettings):
    """Settings of `outrider-target`."""

    model_path: Path = setting(
        DEMO_MODEL,
        "target model: a Hugging Face folder, or its id on the Hub",
        aliases=("model",),
        is_model=True,
    )
    revision: str | None = setting(
        None, "branch, tag or commit of a --model-path that is an id on the Hub"
    )
    served_model_name: str | None = setting(
        None,
        "name that clients pass as `model`; the folder's when unset; `outrider serve` takes "
        "aliases, too",
    )
    tokenizer_path: Path | None = setting(
        None, "folder of the tokenizer; the model's when unset", is_model=True
    )
    dtype: Dtype = setting(
        Dtype.AUTO, "auto: the checkpoint's on a GPU, float32 on a CPU", synonyms=DTYPE_SYNONYMS
    )
    attention_backend: AttentionBackend = setting(
        AttentionBackend.AUTO,
        "auto: triton on CUDA, else torch; SGLang's fa3, flashinfer and the like are taken as auto",
        synonyms=BACKEND_SYNONYMS,
    )
    quantization: Quantisation = setting(
        Quantisation.UNQUANT,
        "quantise the weights of the layers to 8 bits; embedding and lm_head stay",
    )
    enable_deterministic_inference: bool = setting(
        False, "refuse GPUs before Hopper; warn of products whose bits depend on the batch"
    )
    enable_return_routed_experts: bool = setting(
        False, "record the experts of each token, for `return_routed_experts` of /generate"
    )
    tp_size: int = setting(
        1,
        "GPUs that share the model (tensor parallelism), from the device on",
        aliases=("tp", "tensor-parallel-size"),
        minimum=1,
        maximum=64,
    )
    ep_size: int = setting(
        1,
        "1 splits every expert over the GPUs; --tp-size gives each GPU whole experts",
        aliases=("ep", "expert-parallel-size"),
        minimum=1,
        maximum=64,
    )
    enable_dp_attention: bool = setting(
        False, "each GPU of --tp-size has whole attention, and the KV cache of sequences of its own"
    )
    dp_size: int = setting(
        1,
        "--tp-size with --enable-dp-attention, else 1",
        aliases=("dp", "data-parallel-size"),
        minimum=1,
        maximum=64,
    )
    pp_size: int = setting(
        1,
        "stages of --tp-size GPUs that the layers are spread over",
        aliases=("pp", "pipeline-parallel-size"),
        minimum=1,
        maximum=64,
    )
    nnodes: int = setting(1, "hosts that those GPUs are spread over evenly", minimum=1, maximum=64)
    node_rank: int = setting(0, "this host; the first serves, the others compute", minimum=0)
    dist_init_addr: str | None = setting(
        None, "HOST:PORT of the first host, where all meet", aliases=("nccl-init-addr",)
    )
    dist_secret: str | None = setting(
        None, "word that hosts prove to each other that they know", is_secret=True
    )
    kv_cache_dtype: KvDtype = setting(
        KvDtype.AUTO,
        "element type of the KV cache; auto: the model's",
        synonyms={**DTYPE_SYNONYMS, "fp8": "fp8_e4m3"},
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    context_length: int | None = setting(
        None, "largest prompt plus output in tokens; the model's when unset", minimum=2
    )

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(
        50051, "port of TargetService and SpeculationService", minimum=0, maximum=65535
    )
    maintenance_host: str = setting("127.0.0.1", "address of AdminService")
    maintenance_port: int | None = setting(
        None, "port of AdminService; the port plus one when unset", minimum=0, maximum=65535
    )

    grpc_vllm_engine: bool = setting(
        False, "also serve the VllmEngine contract, for the gateway smg"
    )

    page_size: int = setting(16, "tokens a KV page", minimum=1, maximum=1024)
    mem_fraction_static: float | None = setting(
        None,
        "share of free memory for the KV cache; automatic when unset",
        aliases=("mem-fraction",),
        minimum=0.01,
        maximum=1.0,
    )
    remote_draft_features: int = setting(
        0,
        "hidden states of each token that remote drafts will read; part of the KV cache's share",
        minimum=0,
    )
    max_total_tokens: int | None = setting(
        None,
        "tokens in the KV cache, of each GPU with --enable-dp-attention; as many as fit when unset",
        minimum=16,
    )
    max_running_requests: int = setting(256, "sequences that run at once", minimum=1)
    max_queued_requests: int = setting(
        8192, "sequences that wait; further ones are refused with QUEUE_FULL", minimum=1
    )
    chunked_prefill_size: int = setting(2048, "most prompt tokens computed in a step", minimum=1)
    cuda_graph_max_bs: int = setting(
        256, "largest batch that runs as a CUDA graph", minimum=1, maximum=256
    )
    disable_cuda_graph: bool = setting(
        False, "use no CUDA graphs; also disables rounds on the device, which need them"
    )
    disable_overlap_schedule: bool = setting(
        False, "read the results of each step before launching the next"
    )
    disable_radix_cache: bool = setting(False, "disable the prefix cache")

    draft: DraftPlacement = setting(
        DraftPlacement.REMOTE,
        "remote: drafts dial in; embedded: this process hosts one, and takes its flags",
    )
    device_rounds: DeviceRoundsChoice = setting(
        DeviceRoundsChoice.AUTO,
        "run rounds on the device: those of a STANDALONE model or a one-layer head, embedded or on "
        "another GPU of the host, and those whose trees drafts push; auto: on a GPU, and on a CPU "
        "those with pushed trees",
    )
    verification_mode: VerificationChoice = setting(
        VerificationChoice.COUPLED,
        "coupled: output is a function of prompt and seed; point-mass: fresh randomness; the two "
        "flags below name other rules",
    )
    speculative_use_rejection_sampling: bool = setting(
        False,
        "verify chains of an embedded draft by rejection, with fresh randomness; seeds have no "
        "effect",
    )
    speculative_use_block_verification: bool = setting(
        False, "reject whole chains instead of tokens, which accepts more; implies rejection"
    )
    speculative_accept_threshold_single: float = setting(
        1.0, "point-mass only; below 1 accepts more and is lossy", minimum=0.0, maximum=1.0
    )
    speculative_accept_threshold_acc: float = setting(
        1.0, "point-mass only; below 1 accepts more and is lossy", minimum=0.0, maximum=1.0
    )
    max_tree_nodes: int = setting(
        256, "largest tree accepted from a draft, in nodes", minimum=1, maximum=256
    )
    max_draft_sequences: int = setting(256, "most sequences assigned to one draft", minimum=1)
    speculative_adaptive: bool = setting(
        False,
        "choose the depth of remote drafts' trees by measured speed; otherwise it is their own",
    )
    speculative_adaptive_config: Path | None = setting(
        None, "JSON file of candidate steps by batch size, as SGLang has it"
    )
    candidate_wait_ms: float = setting(
        250.0, "longest wait for a draft's trees before a step without them", minimum=0.0
    )
    candidate_wait_sequences: int = setting(
        0,
        "up to so many sequences want trees even while plain steps bring more tokens a second",
        minimum=0,
    )

    max_grammar_bytes: int = setting(
        65_536, "largest JSON schema, regex or grammar of a request", minimum=1
    )
    grammar_timeout_s: float = setting(
        10.0, "longest time to compile the grammar of a request", minimum=0.1
    )

    feature_ring_rows: int = setting(
        4096,
        "rows of memory through which a draft on this host reads features; 0 sends bytes",
        minimum=0,
        maximum=1_048_576,
    )
    num_threads: int = setting(1, "CPU threads of one forward", minimum=1)
    drain_grace_s: float = setting(30.0, "time running requests get at SIGTERM", minimum=0.0)
    metrics_port: int | None = setting(
        None, "port of Prometheus metrics; none when unset", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        problems = [*_rule_problems(self), *_round_problems(self)]
        try:
            _ = self.adaptive
        except SettingsError as error:
            problems += error.problems
        problems += device_problems(self.device)
        problems += [*_parallel_problems(self), *self.ranks.problems, *tls_problems(self)]
        raise_problems(problems)

    @property
    def adaptive(self) -> AdaptiveConfig | None:
        """The tree shapes to choose from; None where `--speculative-adaptive` is off.

        Raises:
            SettingsError: the file of `--speculative-adaptive-config` is wrong, or has no effect.
        """
        path = self.speculative_adaptive_config
        if self.speculative_adaptive:
            return DEFAULT_CONFIG if path is None else read_adaptive_config(path)
        if path is not None:
            line = "--speculative-adaptive-config has no effect without --speculative-adaptive"
            raise SettingsError((line,))
        return None

    @property
    def verification(self) -> VerificationMode:
        """The rule that all flags together name."""
        if self.speculative_use_block_verification:
            return VerificationMode.BLOCK
        if self.speculative_use_rejection_sampling:
            return VerificationMode.REJECTION
        return VerificationMode(self.verification_mode.value)

    @property
    def ranks(self) -> Ranks:
        """The processes that hold the model."""
        return Ranks(self.tp_size, self.pp_size, self.nnodes, self.node_rank, self.dist_init_addr)

    def has_device_rounds(self, *, is_cuda: bool) -> bool:
        """Whether rounds with a draft's model run on the device where they can; on a GPU they are
        CUDA graphs."""
        if self.device_rounds is DeviceRoundsChoice.AUTO:
            return is_cuda and not self.disable_cuda_graph
        return self.device_rounds is DeviceRoundsChoice.ON

    def has_pushed_rounds(self, *, is_cuda: bool) -> bool:
        """Whether rounds with pushed trees run on the device. They pay on a CPU, too; rounds with a
        draft's model do not, because target and draft share the cores."""
        is_auto_on_cpu = self.device_rounds is DeviceRoundsChoice.AUTO and not is_cuda
        return is_auto_on_cpu or self.has_device_rounds(is_cuda=is_cuda)

    @property
    def admin_port(self) -> int:
        """The maintenance port, or its default; 0 for any free port."""
        if self.maintenance_port is not None:
            return self.maintenance_port
        return self.port + 1 if self.port else 0

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(
            quantisation=self.quantization,
            attention_backend=self.attention_backend,
        )

    @property
    def tokenizer_folder(self) -> Path:
        return self.tokenizer_path or self.model_path

    @property
    def model_id(self) -> str:
        """Name clients pass as `model`."""
        return self.served_model_name or shown_name(self.model_path)


# Error messages about combinations of settings that are not possible.


def _parallel_problems(settings: TargetSettings) -> Iterator[str]:
    size = settings.tp_size
    if settings.ep_size not in (1, size):
        yield f"--ep-size: {settings.ep_size}; it must be 1 or --tp-size, {size}"
    if not settings.enable_dp_attention and settings.dp_size > 1:
        yield (
            "--dp-size: replicas are targets of their own: start each with `outrider target`, and "
            "one gateway with `outrider gateway --target A --target B`"
        )
    if settings.enable_dp_attention and not 1 < settings.dp_size == size:
        yield (
            f"--enable-dp-attention: --dp-size is {settings.dp_size} and --tp-size {size}; they "
            f"must be one number, 2 or more, of GPUs that each have sequences of their own"
        )


def _round_problems(settings: TargetSettings) -> Iterator[str]:
    """Only `on` can be in conflict with other settings."""
    if settings.device_rounds is not DeviceRoundsChoice.ON:
        return
    flag, rule = "--device-rounds on", settings.verification
    if settings.disable_cuda_graph:
        yield f"{flag}: rounds on a GPU are CUDA graphs; leave --disable-cuda-graph out"
    if rule is VerificationMode.POINT_MASS:
        yield (
            f"{flag} needs --verification-mode coupled, by which draft and target share their "
            f"random numbers; it is point-mass"
        )
    if rule.draws_chains:
        yield (
            f"{flag}: rounds on the device verify by the coupled rule; {rejection_flag(settings)} "
            f"needs auto or off"
        )


def rejection_flag(settings: TargetSettings) -> str:
    """Returns the flag that asks for verification by the draft's distributions."""
    if settings.speculative_use_block_verification:
        return "--speculative-use-block-verification"
    return "--speculative-use-rejection-sampling"


def _rule_problems(settings: TargetSettings) -> Iterator[str]:
    rule, flag = settings.verification, rejection_flag(settings)
    thresholds = {
        settings.speculative_accept_threshold_single,
        settings.speculative_accept_threshold_acc,
    }
    if thresholds != {1.0} and rule is not VerificationMode.POINT_MASS:
        yield (
            "--speculative-accept-threshold-single and -acc need --verification-mode point-mass; "
            f"the {rule.value} rule has no thresholds"
        )
    if rule.draws_chains and settings.draft is not DraftPlacement.EMBEDDED:
        yield (
            f"{flag} needs --draft embedded: the distributions that tokens were drawn from stay "
            f"in the process that drew them"
        )
    if rule.draws_chains and settings.verification_mode is not VerificationChoice.COUPLED:
        yield (
            f"{flag} and --verification-mode {settings.verification_mode.value} name two rules; "
            f"leave one out"
        )


def with_local_model(settings: TargetSettings) -> TargetSettings:
    """Returns the settings with paths on this machine in place of ids on the Hub.

    Raises:
        SettingsError: a model is not on this machine and cannot be downloaded.
    """
    return with_local_models(settings, {"model_path": "revision"})


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What an embedded draft needs of its target.

    Attributes:
        feature_layers: layers whose features it reads, and CUDA graphs return. Graphs for other
            layers are captured when a draft first needs them, during its first rounds.
        has_lanes: sequences draft in lanes with its head; planned steps verify few trees.
        weight_bytes: approximate size of its weights, on rank 0.
    """

    feature_layers: tuple[int, ...] = ()
    has_lanes: bool = False
    weight_bytes: int = 0


NO_DRAFT = DraftNeeds()
