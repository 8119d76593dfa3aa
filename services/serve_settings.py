"""Settings of `outrider serve` itself; every other flag belongs to a service.

SGLang's launch lines can be used unchanged. A flag or variable of SGLang without a counterpart of
the same name here is accepted with a notice of its effect here, or refused with the reason and the
closest alternative."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.draft.algorithm import Algorithm
from services.stack import StackTimeouts
from shared.errors import raise_problems
from shared.model_options import LoadFormat
from shared.settings import setting
from shared.settings_field import declared_fields

_PREFIX = "--sglang-"
_TRUE = ("1", "true", "yes", "y", "on")
_COMMAND = re.compile(
    r"(?:\S*/)?(?:python[\d.]* -m (?:sglang\.launch_server|vllm\.entrypoints\.openai\.api_server)"
    r"|(?:sglang|vllm) serve)(?= |$)"
)
_VARIABLE = re.compile(r"[A-Z_]+=")

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--enable-eplb": "experts are not moved between GPUs; leave the flag out",
        "--lora-paths": "adapters are not supported; merge them into the checkpoint",
        "--json-model-override-args": "edit config.json in a copy of the folder, and serve that",
        "--is-embedding": "only text generation is served",
        "--chat-template": (
            "the template is chat_template.jinja in the folder of --tokenizer-path; serve a copy "
            "of that folder with yours"
        ),
        "--download-dir": "models are kept in the Hub's cache; the variable HF_HUB_CACHE names it",
        "--base-gpu-id": "name the first GPU by --device cuda:N",
        "--kv-cache-dtype fp8_e5m2": "fp8_e4m3 takes as little memory and is more exact",
        # vLLM's flags for what is always so here.
        "--enable-prefix-caching": "prefixes are always shared; leave the flag out",
        "--enable-chunked-prefill": "prompts are always cut; --chunked-prefill-size says how long",
        "--enable-auto-tool-choice": "tools are always read, see --tool-call-parser; leave it out",
        "--disable-log-requests": "texts of requests are never logged; leave the flag out",
        "--speculative-config": (
            "name its parts: --speculative-algorithm, --speculative-draft-model-path, "
            "--speculative-num-steps, --speculative-eagle-topk, --speculative-num-draft-tokens"
        ),
    }
)
"""Why a flag of SGLang or vLLM, or one value of it, is refused, and what to do."""

_NAMES_OF_VLLM: Mapping[str, str] = MappingProxyType(
    {
        "--max-model-len": "--context-length",
        "--gpu-memory-utilization": "--mem-fraction-static, a share of the memory that is free",
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--chunked-prefill-size",
        "--block-size": "--page-size",
        "--enforce-eager": "--disable-cuda-graph",
        "--max-cudagraph-capture-size": "--cuda-graph-max-bs",
        "--max-seq-len-to-capture": "--cuda-graph-max-bs",
        "--no-enable-prefix-caching": "--disable-radix-cache",
        "--enable-expert-parallel": "--ep-size, the number of --tp-size",
        "--async-scheduling": "the default; --disable-overlap-schedule turns it off",
        "--seed": "--random-seed, which has no effect",
        "--ssl-certfile": "--tls-cert",
        "--ssl-keyfile": "--tls-key",
        "--ssl-ca-certs": "--http-client-ca",
        "--allowed-origins": "--cors-origin",
        "--master-addr": "--dist-init-addr HOST:PORT",
        "--master-port": "--dist-init-addr HOST:PORT",
    }
)

NO_DRAFT = "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Flags of SGLang that change little or nothing here; the help of each is its notice."""

    trust_remote_code: bool = setting(
        False, "no effect: architectures are built in, and code of a checkpoint is never run"
    )
    cuda_graph_bs: tuple[int, ...] = setting(
        (),
        "the largest is taken as --cuda-graph-max-bs; smaller sizes are chosen automatically",
        minimum=1,
    )
    disable_cuda_graph_padding: bool = setting(
        False, "no effect: graphs are captured for chosen sizes, and steps between them are padded"
    )
    enable_torch_compile: bool = setting(
        False, "no effect: forwards are fused kernels in CUDA graphs, on a CPU plain torch"
    )
    torch_compile_max_bs: int | None = setting(None, "no effect, like --enable-torch-compile")
    enable_multi_layer_eagle: bool = setting(
        False, "EAGLE and NEXTN use the target's next-token layers (MTP), one or several"
    )
    enable_metrics: bool = setting(
        False, "no effect: the gateway has /metrics; --target-metrics-port opens the target's"
    )
    skip_server_warmup: bool = setting(
        False, "no effect: the ready line comes after a warm-up of the target and its draft"
    )
    random_seed: int | None = setting(
        None, "no effect: a request's own seed decides, and without one each answer has its own"
    )
    stream_interval: int | None = setting(
        None, "no effect: tokens are sent as soon as a step has them"
    )
    schedule_policy: str | None = setting(
        None, "no effect: requests run in order of arrival, and prefixes are always shared"
    )
    schedule_conservativeness: float | None = setting(
        None, "no effect: a sequence is admitted when enough KV pages are free"
    )
    max_prefill_tokens: int | None = setting(
        None, "no effect: --chunked-prefill-size bounds the prompt tokens of a step"
    )
    decode_log_interval: int | None = setting(
        None, "no effect: figures are in /metrics, and --target-round-log has each step"
    )
    watchdog_timeout: float | None = setting(
        None, "no effect: requests have --request-timeout-s, and a dead engine ends its process"
    )
    moe_runner_backend: str | None = setting(
        None, "no effect: expert layers have one implementation"
    )
    speculative_moe_runner_backend: str | None = setting(
        None, "no effect: expert layers have one implementation, in drafts as well"
    )
    moe_a2a_backend: str | None = setting(None, "no effect: GPUs exchange sums, not rows")
    speculative_moe_a2a_backend: str | None = setting(
        None, "no effect: GPUs exchange sums, not rows"
    )
    disable_shared_experts_fusion: bool = setting(
        False, "no effect: shared experts are a product of their own"
    )
    sampling_backend: str | None = setting(None, "no effect: sampling has one implementation")
    grammar_backend: str | None = setting(None, "no effect: grammars are compiled by llguidance")
    load_format: LoadFormat | None = setting(
        None, "no effect: weights are safetensors, or pytorch_model.bin where there are none"
    )
    log_requests: bool = setting(
        False, "no effect: the end of each request is logged, its texts never are"
    )
    enable_mixed_chunk: bool = setting(
        False, "no effect: chunks of prompts and decoding always share steps"
    )
    enable_p2p_check: bool = setting(
        False, "no effect: whether GPUs reach each other's memory is always checked"
    )
    enable_cache_report: bool = setting(False, "no effect: `usage` always has `cached_tokens`")
    enable_memory_saver: bool = setting(
        False, "no effect: memory can be released on one GPU with --disable-cuda-graph"
    )


def without_prefix(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--X` for `--sglang-X`, the form in which trainers pass flags."""
    return [
        f"--{word.removeprefix(_PREFIX)}" if word.startswith(_PREFIX) else word
        for word in arguments
    ]


def without_command(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without the command of another server, if a whole line was pasted:
    `python -m sglang.launch_server`, `sglang serve`, `vllm serve MODEL`."""
    begin = next((i for i, word in enumerate(arguments) if not _VARIABLE.match(word)), 0)
    variables, words = arguments[:begin], arguments[begin:]
    command = _COMMAND.match(" ".join(words))
    if command is None:
        return list(arguments)
    rest = words[len(command[0].split()) :]
    if rest and not rest[0].startswith("-"):
        rest = ["--model-path", *rest]
    return [*variables, *rest]


def refusal(flag: str, texts: Sequence[str]) -> str | None:
    """Returns why a flag of another server, or its value, is refused, and the closest alternative;
    None for other flags."""
    if flag in _NAMES_OF_VLLM:
        return f"{flag} is vLLM's name; here it is {_NAMES_OF_VLLM[flag]}"
    for name in (flag, " ".join((flag, *texts))):
        if name in _REFUSED:
            return f"{name}: {_REFUSED[name]}"
    return None


def notices(settings: SglangSettings) -> list[str]:
    """Returns a line for each flag that was given."""
    return [
        f"{field.flag}: {field.help}"
        for field in declared_fields(SglangSettings)
        if getattr(settings, field.name) != field.default
    ]


def variable_notices(env: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable of SGLang that is set and known to be harmless."""
    if not env.get("SGLANG_ENABLE_SPEC_V2"):
        return []
    return [
        "SGLANG_ENABLE_SPEC_V2: no effect: steps overlap with drafts unless "
        "--disable-overlap-schedule is set"
    ]


def variable_problems(env: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable of SGLang that would change what is served."""
    if env.get("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "").lower() not in _TRUE:
        return []
    return [
        "SGLANG_NGRAM_FORCE_GREEDY_VERIFY: trees are verified by the rule that the target samples "
        "by, so that drafts never change an answer; unset it, and let requests that want greedy "
        "answers say temperature 0"
    ]


class Placement(enum.Enum):
    """Placement of the draft: in a process of its own, or in the target's."""

    AUTO = "auto"
    REMOTE = "remote"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings(SglangSettings):
    """Starts target, drafts and gateway on this host. Accepts the flags of all three services, and
    SGLang's launch lines."""

    speculative_algorithm: tuple[str, ...] = setting(
        (),
        "drafter; several by comma or space start a draft each, NONE decodes plainly; unset: "
        "STANDALONE for the demo or with a draft model, else NGRAM",
        aliases=("speculative-algo", "algorithm"),
        choices=(*(algorithm.value for algorithm in Algorithm), NO_DRAFT),
    )
    placement: Placement = setting(
        Placement.AUTO,
        "remote: the draft is its own process; embedded: it runs in the target's; auto: embedded "
        "for a head on a GPU, or if the target uses every GPU, else remote",
        aliases=("draft",),
    )
    speculative_online_training: bool = setting(
        False,
        "start a learner, which trains the draft's head on the target's answers; set its flags by "
        "variables, OUTRIDER_LEARNER_…",
    )
    certs: Path | None = setting(
        None, "folder that `make certs` wrote: TLS on every connection, mutual between services"
    )
    log_dir: Path = setting(Path(".run"), "folder for one log file per process")
    start_timeout_s: float = setting(
        StackTimeouts().start_s, "time until everything is ready", minimum=0.1
    )
    stop_grace_s: float = setting(
        StackTimeouts().stop_s, "time between SIGTERM and SIGKILL, for each process", minimum=0.1
    )

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.certs is not None and not (self.certs / "ca.pem").is_file():
            problems.append(f"--certs: {self.certs} has no ca.pem; `make certs` writes one")
        count = len(self.algorithms or ())
        if count > 1 and self.placement is Placement.EMBEDDED:
            problems.append(
                f"--placement: a target embeds one draft; --speculative-algorithm names {count}"
            )
        raise_problems(problems)

    @property
    def algorithms(self) -> tuple[str, ...] | None:
        """Drafters to start, each once; None leaves the choice to the models."""
        if not self.speculative_algorithm:
            return None
        return tuple(name for name in dict.fromkeys(self.speculative_algorithm) if name != NO_DRAFT)

    @property
    def timeouts(self) -> StackTimeouts:
        return StackTimeouts(start_s=self.start_timeout_s, stop_s=self.stop_grace_s)
