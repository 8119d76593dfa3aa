"""From a launch line to a plan: the settings of every process and where each runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from gateway.settings import GatewaySettings
from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import target_vocabulary
from services.draft.learner.settings import TAUGHT, LearnerSettings
from services.draft.settings import DraftSettings, checked_models
from services.embedded_settings import embedded_settings, with_target_tokenizer
from services.serve_line import DRAFT, GATEWAY, LAUNCHER, TARGET, Line, split_line
from services.serve_settings import (
    NO_DRAFT,
    LauncherSettings,
    Placement,
    notices,
    variable_notices,
    variable_problems,
)
from services.target.settings import DEMO_MODEL, TargetSettings, with_local_model
from shared.errors import OutriderError, SettingsError, raise_problems
from shared.hub import shown_name
from shared.model_options import BACKEND_SYNONYMS
from shared.settings import load_settings, value_problems
from shared.settings_field import declared_fields
from shared.tls import CertFolder

_DEVICE_FILE = re.compile(r"nvidia\d+")

LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "")
_MAX_GRAPH_SEQUENCES = 256
_GRAPHS_FLAG = "--cuda-graph-max-bs"
_WAIT_FLAG = "--candidate-wait-sequences"
_DEMO_SHAPE = MappingProxyType(
    {
        "--speculative-num-steps": 4,
        "--speculative-eagle-topk": 2,
        "--speculative-num-draft-tokens": 8,
    }
)
_FEATURES_FLAG = "--remote-draft-features"
_SHARED_GPU_FRACTION = 0.1  # of free memory, for the KV cache of a draft on the target's GPU
_CPU_OUTCOME_BUDGET = 2
"""For a draft model on a CPU: a second core drafts ahead while the target verifies."""
_OWN_DEVICE_FLAGS = ("--device", "--speculative-outcome-budget")
"""Flags of a draft with its own device."""
_REVISIONS = ("--revision", "--speculative-draft-model-revision")
S = TypeVar("S")


def num_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns how many GPUs a child process would see.

    Args:
        env: `CUDA_VISIBLE_DEVICES` hides the GPUs that it does not name.
        devices: folder of device files, one for each GPU of the host or container.
    """
    present = sum(_DEVICE_FILE.fullmatch(file.name) is not None for file in devices.iterdir())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    return min(present, len(names))


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft, in its own process or in the target's.

    Attributes:
        arguments: flags of its process, or of the target for a draft that it hosts.
    """

    name: str
    settings: DraftSettings
    arguments: tuple[str, ...]

    @property
    def algorithm(self) -> str:
        """The requested algorithm, with the actual one in brackets if it differs."""
        requested, actual = self.settings.speculative_algorithm, self.settings.algorithm
        is_same = requested is actual or requested is Algorithm.NEXTN
        return requested.value if is_same else f"{requested.value} ({actual.value})"


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes that a launch line starts.

    Attributes:
        target_arguments, gateway_arguments: flags of the two processes.
        learner_arguments: flags of the learner; empty without a learner.
        notices: a line for each flag that has no effect, or another than its name says.
    """

    launcher: LauncherSettings
    placement: Placement
    target: TargetSettings
    target_arguments: tuple[str, ...]
    drafts: tuple[PlannedDraft, ...]
    gateway: GatewaySettings
    gateway_arguments: tuple[str, ...]
    learner_arguments: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def remote_drafts(self) -> tuple[PlannedDraft, ...]:
        return self.drafts if self.placement is Placement.REMOTE else ()

    @property
    def ports(self) -> list[tuple[int, str]]:
        """Every port of the stack, with the flag that moves it. Each service has two in a row."""
        measured: list[tuple[TargetSettings | DraftSettings, str]] = [
            (self.target, "--target"),
            *((draft.settings, "--draft") for draft in self.remote_drafts),
        ]
        ports = [(self.gateway.port, "--port"), (self.gateway.admin_port, "--port")]
        for settings, service in measured:
            flag = f"{service}-port"
            ports += [(settings.port, flag), (settings.admin_port, flag)]
        metrics = (
            (settings.metrics_port, f"{service}-metrics-port") for settings, service in measured
        )
        return [*ports, *((port, flag) for port, flag in metrics if port)]


def make_plan(arguments: Sequence[str], env: Mapping[str, str], num_gpus: int) -> Plan:
    """Reads a launch line, and fetches models that are given as ids of the Hub.

    Args:
        arguments: flags, without the name of the program.
        env: `OUTRIDER_*` and some of `SGLANG_*` are read.
        num_gpus: GPUs that the processes will see.

    Raises:
        SettingsError: one line for each problem.
    """
    return _PlanBuilder(env, num_gpus, split_line(arguments)).plan()


class _PlanBuilder:
    """Makes a plan of a launch line, and collects its problems."""

    launcher: LauncherSettings
    target: TargetSettings
    placement: Placement

    def __init__(self, env: Mapping[str, str], num_gpus: int, line: Line) -> None:
        self.env = env
        self.num_gpus = num_gpus
        self.line = line
        self.problems: list[str] = [*line.problems, *variable_problems(env)]
        self.notices: list[str] = []

    def plan(self) -> Plan:
        """Raises:
        SettingsError: see `make_plan`.
        """
        words = self.line.services[TARGET]
        self.notices += _cap_graphs(words)
        self._check_values()
        launcher = self._load(LauncherSettings, LAUNCHER, self.line.own)
        if launcher is not None:
            self.launcher = launcher
            self.notices += [*notices(launcher), *variable_notices(self.env)]
            self.notices += _backend_notices(self.line)
            _add_certs(launcher, self.line)
            if sizes := launcher.cuda_graph_bs:
                words.insert(0, f"{_GRAPHS_FLAG}={min(max(sizes), _MAX_GRAPH_SEQUENCES)}")
        target = self._load(TargetSettings, TARGET, words)
        self._load(GatewaySettings, GATEWAY, self.line.services[GATEWAY])
        self.target = self._required(target)
        self._raise_problems()
        if _is_demo(self.target) and not any(DEMO_MODEL.glob("*.safetensors")):
            raise SettingsError(
                (
                    "--model-path: name a model; the demo's weights are a package of their own, "
                    "outrider-demo, which is not installed",
                )
            )
        self.target = with_local_model(self.target)
        names = self.launcher.algorithms
        are_heads = names is not None and all(Algorithm(name).reads_features for name in names)
        if self._is_cpu_demo and not are_heads and not self._is_given(words, TARGET, _WAIT_FLAG):
            # The demo on a CPU is there to show trees: a lone request waits for them even where
            # plain steps are as fast. With the trees of heads it would be slower.
            words.append(f"{_WAIT_FLAG}=1")
            self.target = replace(self.target, candidate_wait_sequences=1)
        return self._with_drafts()

    def _check_values(self) -> None:
        """Raises: SettingsError if a value of any process is invalid, before a model is fetched."""
        kinds: tuple[tuple[type, str], ...] = (
            (LauncherSettings, LAUNCHER),
            (TargetSettings, TARGET),
            (DraftSettings, DRAFT),
            (GatewaySettings, GATEWAY),
        )
        for cls, service in kinds:
            self.problems += value_problems(
                cls,
                service=service,
                arguments=self.line.services.get(service, self.line.own),
                env=self.env,
                typed=self.line.typed[service],
            )
        self._raise_problems()

    def _read(self, settings: Callable[[], S]) -> S | None:
        """Returns the result of `settings`; if it raises, adds its problems and returns None."""
        try:
            return settings()
        except SettingsError as error:
            self.problems += error.problems
        except OutriderError as error:
            self.problems.append(error.message)
        return None

    def _load(self, cls: type[S], service: str, words: Sequence[str]) -> S | None:
        return self._read(
            lambda: load_settings(cls, service=service, arguments=words, env=self.env)
        )

    def _required(self, settings: S | None) -> S:
        """Raises: SettingsError if `settings` is None."""
        if settings is None:
            self._raise_problems()
        assert settings is not None, "a problem says why"
        return settings

    def _raise_problems(self) -> None:
        """Raises: SettingsError if there are problems."""
        raise_problems(dict.fromkeys(self.problems))

    @property
    def _is_cpu_demo(self) -> bool:
        return _is_demo(self.target) and (self.target.device == "cpu" or not self.num_gpus)

    def _demo_shape(self, words: Sequence[str], algorithm: str) -> list[str]:
        """Returns flags for trees with branches for the demo's small model, whose default is a
        chain."""
        is_set = any(self._is_given(words, DRAFT, flag) for flag in _DEMO_SHAPE)
        is_chain = algorithm == "STANDALONE" and not self.target.speculative_adaptive
        if is_set or not is_chain or not self._is_cpu_demo:
            return []
        return [f"{flag}={value}" for flag, value in _DEMO_SHAPE.items()]

    def _is_given(self, words: Sequence[str], service: str, flag: str) -> bool:
        name = flag.removeprefix("--").replace("-", "_").upper()
        return _has(words, flag) or bool(self.env.get(f"OUTRIDER_{service.upper()}_{name}"))

    @property
    def _has_draft_model(self) -> bool:
        return _has(self.line.services[DRAFT], "--speculative-draft-model-path")

    def _with_drafts(self) -> Plan:
        """Plans drafts, gateway and learner; the target's model is on this machine by now."""
        launcher, target = self.launcher, self.target
        algorithms = launcher.algorithms
        if algorithms is None:
            # The demo draft fits the demo model only; another model drafts from its own text.
            has_draft = _is_demo(target) or self._has_draft_model
            algorithms = ("STANDALONE" if has_draft else "NGRAM",)
        self.placement = self._choose_placement(algorithms)
        if not algorithms:
            unused = [word.partition("=")[0] for word in self.line.services[DRAFT]]
            unused = [flag for flag in unused if flag.startswith("--speculative")]
            if unused:
                flags = ", ".join(unused)
                self.notices.append(f"{flags}: no effect: {NO_DRAFT} starts no draft")
        if len(algorithms) > 1 and self._has_draft_model:
            self.problems.append(
                f"--speculative-draft-model-path is of one draft; --speculative-algorithm names "
                f"{len(algorithms)}"
            )
        if launcher.enable_multi_layer_eagle:
            algorithms = tuple("MTP" if name in ("EAGLE", "NEXTN") else name for name in algorithms)
        drafts = [
            draft
            for place, algorithm in enumerate(algorithms)
            if (draft := self._plan_draft(algorithm, place))
        ]
        if target.speculative_adaptive and any(draft.settings.is_shape_pinned for draft in drafts):
            self.notices.append(
                "--speculative-adaptive: the shape that is set stays, and only whether to draft is "
                "chosen; --speculative-eagle-topk 1 alone leaves the depth to it"
            )
        gateway_words = self._gateway_words()
        gateway = self._required(self._load(GatewaySettings, GATEWAY, gateway_words))
        self._raise_problems()
        plan = Plan(
            launcher=launcher,
            placement=self.placement,
            target=target,
            target_arguments=self._target_words(drafts),
            drafts=tuple(drafts),
            gateway=gateway,
            gateway_arguments=tuple(gateway_words),
            learner_arguments=self._learner_words(drafts),
            notices=tuple(self.notices),
        )
        self.problems += _port_problems(plan)
        self._raise_problems()
        return plan

    def _choose_placement(self, algorithms: Sequence[str]) -> Placement:
        """Two processes that alternate on one GPU pay for every context switch, so the target hosts
        a draft that shares its GPU. A draft model runs on a free GPU if there is one. A head is
        faster in the target's process even then, unless flags of `_OWN_DEVICE_FLAGS` are given."""
        if self.launcher.placement is not Placement.AUTO:
            return self.launcher.placement
        is_on_gpu = self.num_gpus >= 1 and self.target.device != "cpu"
        if not is_on_gpu or len(algorithms) != 1:
            return Placement.REMOTE
        words = self.line.services[DRAFT]
        has_own_device = any(self._is_given(words, DRAFT, flag) for flag in _OWN_DEVICE_FLAGS)
        is_hosted_head = Algorithm(algorithms[0]).reads_features and not has_own_device
        shares_gpus = self.num_gpus <= self.target.ranks.num_here
        return Placement.EMBEDDED if shares_gpus or is_hosted_head else Placement.REMOTE

    def _plan_draft(self, algorithm: str, place: int) -> PlannedDraft | None:
        target = self.target
        if algorithm == "STANDALONE" and not _is_demo(target) and not self._has_draft_model:
            self.problems.append(
                "--speculative-draft-model-path: STANDALONE needs a smaller model with the same "
                "tokenizer, and the demo's draft fits the demo model alone; "
                "--speculative-algorithm NGRAM needs no model"
            )
            return None
        given = self.line.services[DRAFT]
        words = [*self._demo_shape(given, algorithm), *given]
        words.append(f"--speculative-algorithm={algorithm}")
        if self.placement is Placement.EMBEDDED:
            names = {field.flag for field in declared_fields(TargetSettings)}
            words = [
                word if word.partition("=")[0] not in names else f"--draft{word[1:]}"
                for word in words
            ]
            settings = self._read(lambda: embedded_settings(target, words, self.env))
            return self._make_draft("draft", settings, words)
        words = [*self._default_words(algorithm, place), *words]
        words.append(f"--target={dial_address(target.host, target.port)}")
        chosen = self._load(DraftSettings, DRAFT, words)
        if chosen is None:
            return None
        if place:
            # Metrics are often on the port after the two that each draft has.
            shift = place * (3 if chosen.metrics_port else 2)
            words += [f"--port={chosen.port + shift}"]
            words += [f"--maintenance-port={chosen.port + shift + 1}"]
            if chosen.metrics_port:
                words += [f"--metrics-port={chosen.metrics_port + shift}"]
        settings = self._read(
            lambda: with_target_tokenizer(
                checked_models(
                    load_settings(DraftSettings, service=DRAFT, arguments=words, env=self.env)
                ),
                target,
            )
        )
        is_only = len(self.launcher.algorithms or (algorithm,)) == 1
        return self._make_draft(
            "draft" if is_only else f"draft-{algorithm.lower()}", settings, words
        )

    def _make_draft(
        self, name: str, settings: DraftSettings | None, words: Sequence[str]
    ) -> PlannedDraft | None:
        """Returns the draft, or None without settings. Adds a notice on how many of the target's
        tokens a draft with another tokenizer has."""
        if settings is None:
            return None
        vocabulary = self._read(lambda: target_vocabulary(settings))
        if vocabulary is not None:
            self.notices.append(
                f"--speculative-draft-model-path: {shown_name(settings.model_folder)} has another "
                f"tokenizer than the target; it drafts {vocabulary.words()}"
            )
        return PlannedDraft(name, settings, _with_local_models(settings, words))

    def _default_words(self, algorithm: str, place: int) -> list[str]:
        """Flags of a draft's process that the launch line may override."""
        words = []
        kind, target = Algorithm(algorithm), self.target
        if kind.reads_features and not _is_demo(target):
            words.append(f"--target-model-path={target.model_path}")
        free_gpu = target.ranks.num_here + place
        if kind.has_model and free_gpu < self.num_gpus and target.device == "auto":
            words.append(f"--device=cuda:{free_gpu}")
        elif kind.has_model and self.num_gpus and target.device != "cpu":
            words.append(f"--mem-fraction-static={_SHARED_GPU_FRACTION}")
        elif kind is Algorithm.STANDALONE:
            words.append(f"--speculative-outcome-budget={_CPU_OUTCOME_BUDGET}")
        return words

    def _target_words(self, drafts: Sequence[PlannedDraft]) -> tuple[str, ...]:
        target = self.target
        words = [*_with_local_models(target, self.line.services[TARGET])]
        if self.placement is Placement.EMBEDDED:
            for draft in drafts:
                words += ["--draft=embedded", *draft.arguments]
        else:
            num_heads = sum(draft.settings.algorithm.reads_features for draft in drafts)
            if num_heads and not self._is_given(words, TARGET, _FEATURES_FLAG):
                words.append(f"{_FEATURES_FLAG}={num_heads}")
        return tuple(words)

    def _gateway_words(self) -> list[str]:
        words, target = [*self.line.services[GATEWAY]], self.target
        if not _has(words, "--tokenizer") and not _is_demo(target):
            words.append(f"--tokenizer={target.tokenizer_folder}")
        return [*words, f"--target={dial_address(target.host, target.port)}"]

    def _learner_words(self, drafts: Sequence[PlannedDraft]) -> tuple[str, ...]:
        """Returns the flags of the learner of the only draft; none without a learner."""
        launcher, target = self.launcher, self.target
        if not launcher.speculative_online_training:
            return ()
        algorithms = [draft.settings.algorithm for draft in drafts]
        if len(algorithms) != 1 or algorithms[0] not in TAUGHT:
            names = ", ".join(algorithm.value for algorithm in algorithms) or NO_DRAFT
            self.problems.append(
                f"--speculative-online-training: one draft by "
                f"{', '.join(algorithm.value for algorithm in TAUGHT)} can be taught; "
                f"--speculative-algorithm names {names}"
            )
            return ()
        draft = drafts[0].settings
        if self._read(lambda: target_vocabulary(draft)) is not None:
            self.problems.append(
                "--speculative-online-training: a draft with another tokenizer than its target's "
                "cannot be taught"
            )
            return ()
        is_hosted = self.placement is Placement.EMBEDDED
        host: TargetSettings | DraftSettings = target if is_hosted else draft
        words = [
            f"--target={dial_address(target.host, target.port)}",
            f"--publish-to={dial_address(host.maintenance_host, host.admin_port)}",
            f"--speculative-algorithm={draft.algorithm.value}",
            f"--speculative-draft-model-path={draft.model_folder}",
            f"--target-model-path={target.model_path}",
            f"--dtype={host.dtype.value}",
            f"--device={host.device}",
            f"--out={launcher.log_dir / 'learner'}",
        ]
        words += [
            f"{field.flag}={value}"
            for field in declared_fields(DraftSettings)
            if field.name.startswith("target_tls_")
            and (value := getattr(draft, field.name)) is not None
        ]
        self._load(LearnerSettings, "learner", words)
        return tuple(words)


def dial_address(host: str, port: int) -> str:
    """Returns the address at which this host reaches a server that it runs."""
    return f"{LOOPBACK if host in _ANY_ADDRESS else host}:{port}"


def _is_demo(target: TargetSettings) -> bool:
    return target.model_path.resolve() == DEMO_MODEL.resolve()


def _with_local_models(settings: object, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags with the local paths of models instead of their ids on the Hub."""
    models = [field for field in declared_fields(type(settings)) if field.is_model]
    dropped = {*_REVISIONS, *(field.flag for field in models)}
    kept = [word for word in words if word.partition("=")[0] not in dropped]
    kept += [
        f"{field.flag}={value}"
        for field in models
        if (value := getattr(settings, field.name)) not in (None, field.default)
    ]
    return tuple(kept)


def _add_certs(launcher: LauncherSettings, line: Line) -> None:
    """Expands `--certs` into TLS flags of each service, placed before those of the launch line."""
    if launcher.certs is None:
        return
    folder = CertFolder(launcher.certs.resolve())
    server, client = folder.server_tls(), folder.client_tls()
    server_flags = [f"--tls-cert={server.cert}", f"--tls-key={server.key}"]
    server_flags.append(f"--tls-client-ca={folder.ca}")
    client_flags = [f"--target-tls-ca={client.ca}", f"--target-tls-cert={client.cert}"]
    client_flags.append(f"--target-tls-key={client.key}")
    line.services[TARGET][:0] = server_flags
    for service in (DRAFT, GATEWAY):
        line.services[service][:0] = [*server_flags, *client_flags]


def _cap_graphs(words: list[str]) -> Iterator[str]:
    """Lowers the number of sequences of the largest CUDA graph to the most that there can be, with
    a notice."""
    for place, word in enumerate(words):
        flag, _, text = word.partition("=")
        if flag == _GRAPHS_FLAG and text.isdecimal() and int(text) > _MAX_GRAPH_SEQUENCES:
            words[place] = f"{flag}={_MAX_GRAPH_SEQUENCES}"
            yield (
                f"{flag} {text}: {_MAX_GRAPH_SEQUENCES} is taken, the most there can be; larger "
                f"batches run without a graph"
            )


def _backend_notices(line: Line) -> list[str]:
    words = [word for words in line.services.values() for word in words]
    given = [word.partition("=") for word in words]
    return [
        f"{flag} {name}: this backend is not here; auto is taken"
        for flag, _, name in given
        if flag.endswith("attention-backend")
        and name.lower() != "auto"
        and BACKEND_SYNONYMS.get(name.lower()) == "auto"
    ]


def _port_problems(plan: Plan) -> Iterator[str]:
    for port, flag in plan.ports:
        if port == 0:
            yield f"{flag}: a launcher needs to know the port; 0 is none"
    counts = Counter(port for port, _ in plan.ports)
    twice = sorted(port for port, count in counts.items() if count > 1 and port)
    if twice:
        flags = dict.fromkeys(flag for port, flag in plan.ports if port in twice)
        yield (
            f"ports wanted twice: {', '.join(map(str, twice))}; each service takes two in a row: "
            f"set {' or '.join(flags)}"
        )


def _has(words: Sequence[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)
