"""From a launch line to what is started: the settings of every process and where each runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from gateway.settings import GatewaySettings
from services.cert_folder import CertFolder
from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import target_vocabulary
from services.draft.learner.settings import TAUGHT, LearnerSettings
from services.draft.settings import DraftSettings, with_local_models
from services.embedded_settings import embedded_settings, with_target_tokenizer
from services.serve_line import DRAFT, GATEWAY, TARGET, Line, take_apart
from services.serve_settings import (
    NO_DRAFT,
    LauncherSettings,
    Placement,
    notices,
    variable_notices,
    variable_problems,
)
from services.target.settings import DEMO_MODEL, TargetSettings, with_local_model
from shared.errors import OutriderError, SettingsError
from shared.hub import shown_name
from shared.model_options import BACKEND_SYNONYMS
from shared.settings import load_settings
from shared.settings_field import declared_fields

_DEVICE_FILE = re.compile(r"nvidia\d+")

LOOPBACK = "127.0.0.1"
_DEMO_NAME = "demo"
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "")
_MOST_GRAPH_SEQUENCES = 256
_WAITS = "--candidate-wait-sequences"
_SHAPE = MappingProxyType(
    {
        "--speculative-num-steps": 4,
        "--speculative-eagle-topk": 2,
        "--speculative-num-draft-tokens": 8,
    }
)
# Of a GPU's free memory, what a cache and the features of its tokens take, which are about so large
# beside it. The first GPU has those of every rank that has sequences of its own.
_WITH_FEATURES, _FEATURES_EACH = 0.93, 0.19
_BESIDE_TARGET = 0.1  # of a GPU's free memory, for the cache of a draft that shares it
_APART = ("--device", "--speculative-outcome-budget")
"""Flags of a draft with a device of its own."""
_REVISIONS = ("--revision", "--speculative-draft-model-revision")
S = TypeVar("S")


def num_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns how many GPUs a child process would see.

    Args:
        env: `CUDA_VISIBLE_DEVICES` hides those that it does not name.
        devices: folder of device files, of which each GPU of a host or container has one.
    """
    present = sum(_DEVICE_FILE.fullmatch(each.name) is not None for each in devices.iterdir())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [each.strip() for each in visible.split(",") if each.strip() not in ("", "-1")]
    return min(present, len(named))


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft, in a process of its own or in the target's.

    Attributes:
        arguments: of its process; none when the target hosts it.
    """

    name: str
    settings: DraftSettings
    arguments: tuple[str, ...]

    @property
    def algorithm(self) -> str:
        """As it was asked for, with what it turned out to be."""
        asked, found = self.settings.speculative_algorithm, self.settings.algorithm
        is_same = asked is found or asked is Algorithm.NEXTN
        return asked.value if is_same else f"{asked.value} ({found.value})"


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes that a launch line starts.

    Attributes:
        target_arguments, gateway_arguments: of their processes.
        learner_arguments: likewise; none where nothing learns.
        notices: a line for each flag that does something other than it says.
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
    def is_demo(self) -> bool:
        return _is_demo(self.target)

    @property
    def remote_drafts(self) -> tuple[PlannedDraft, ...]:
        return self.drafts if self.placement is Placement.REMOTE else ()

    @property
    def ports(self) -> dict[int, str]:
        """Every port of the stack, with the flag that moves it."""
        services: list[tuple[Any, str]] = [
            (self.gateway, "--port"),
            (self.target, "--target-port"),
            *((draft.settings, "--draft-port") for draft in self.remote_drafts),
        ]
        return {port: flag for each, flag in services for port in (each.port, each.admin_port)}


def make_plan(arguments: Sequence[str], env: Mapping[str, str], num_gpus: int) -> Plan:
    """Reads a launch line, fetching models that are named by their id on the Hub.

    Args:
        arguments: flags, without the name of the program.
        env: `OUTRIDER_*` and some of `SGLANG_*` are read.
        num_gpus: GPUs that the processes will see.

    Raises:
        SettingsError: one line for each thing that is wrong.
    """
    return _Making(env, num_gpus, take_apart(arguments)).plan()


class _Making:
    """A plan that is being made of a launch line; each step adds what is wrong."""

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
        self.launcher = self._needed(self._load(LauncherSettings, "serve", self.line.own))
        self.notices += [*notices(self.launcher), *variable_notices(self.env)]
        self.notices += _backend_notices(self.line)
        _add_certs(self.launcher, self.line)
        _add_graph_sizes(self.launcher, self.line)
        words = self.line.services[TARGET]
        self.target = self._needed(self._load(TargetSettings, TARGET, words))
        self._refuse()
        if _is_demo(self.target) and not any(DEMO_MODEL.glob("*.safetensors")):
            raise SettingsError(
                (
                    "--model-path: name a model; the demo's weights are a package of their own, "
                    "outrider-demo, which is not installed",
                )
            )
        self.target = with_local_model(self.target)
        self._show_trees()
        return self._with_drafts()

    def _read(self, settings: Callable[[], S]) -> S | None:
        """Returns what `settings` returns; notes what it raises."""
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

    def _needed(self, settings: S | None) -> S:
        """Raises: SettingsError if there are none."""
        if settings is None:
            self._refuse()
        assert settings is not None, "a problem says why"
        return settings

    def _refuse(self) -> None:
        """Raises: SettingsError if anything is wrong."""
        if self.problems:
            raise SettingsError(tuple(dict.fromkeys(self.problems)))

    def _show_trees(self) -> None:
        """The demo on a CPU is there to be looked at: a request that is alone waits for trees even
        where plain steps are as fast. A flag or variable says otherwise."""
        words = self.line.services[TARGET]
        if self._is_shown and not self._is_given(words, TARGET, _WAITS):
            words.append(f"{_WAITS}=1")
            self.target = replace(self.target, candidate_wait_sequences=1)

    @property
    def _is_shown(self) -> bool:
        return _is_demo(self.target) and (self.target.device == "cpu" or not self.num_gpus)

    def _shown_shape(self, words: Sequence[str], algorithm: str) -> list[str]:
        """Trees with branches for the demo's small model, whose own default is a chain."""
        is_set = any(self._is_given(words, DRAFT, flag) for flag in _SHAPE)
        is_free = self.target.speculative_adaptive or algorithm != "STANDALONE"
        if is_set or is_free or not self._is_shown:
            return []
        return [f"{flag}={value}" for flag, value in _SHAPE.items()]

    def _is_given(self, words: Sequence[str], service: str, flag: str) -> bool:
        name = flag.removeprefix("--").replace("-", "_").upper()
        return _has(words, flag) or bool(self.env.get(f"OUTRIDER_{service.upper()}_{name}"))

    @property
    def _has_draft_model(self) -> bool:
        return _has(self.line.services[DRAFT], "--speculative-draft-model-path")

    def _with_drafts(self) -> Plan:
        """Goes on when the target's model is on this machine."""
        launcher, target = self.launcher, self.target
        algorithms = launcher.algorithms
        if algorithms is None:
            # The demo draft fits the demo model only; another model drafts from its own text.
            has_draft = _is_demo(target) or self._has_draft_model
            algorithms = ("STANDALONE" if has_draft else "NGRAM",)
        self.placement = self._placed(algorithms)
        if not algorithms:
            self._note_unused()
        if len(algorithms) > 1 and self._has_draft_model:
            self.problems.append(
                f"--speculative-draft-model-path is of one draft; --speculative-algorithm names "
                f"{len(algorithms)}"
            )
        if launcher.enable_multi_layer_eagle:
            algorithms = tuple("MTP" if each in ("EAGLE", "NEXTN") else each for each in algorithms)
        drafts = [
            planned
            for place, algorithm in enumerate(algorithms)
            if (planned := self._planned(algorithm, place))
        ]
        if target.speculative_adaptive and any(each.settings.is_shape_pinned for each in drafts):
            self.notices.append(
                "--speculative-adaptive: the shape that is set stays, and only whether to draft is "
                "chosen; --speculative-eagle-topk 1 alone leaves the depth to it"
            )
        gateway_words = self._gateway_words()
        gateway = self._needed(self._load(GatewaySettings, GATEWAY, gateway_words))
        self._refuse()
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
        self._refuse()
        return plan

    def _placed(self, algorithms: Sequence[str]) -> Placement:
        """Two processes that alternate on one GPU pay for every switch, so there the target hosts
        the draft. With a GPU to spare a draft model has it to itself; a head is faster in the
        target's process even then, unless flags say what a draft elsewhere does."""
        if self.launcher.placement is not Placement.AUTO:
            return self.launcher.placement
        is_on_gpu = self.num_gpus >= 1 and self.target.device != "cpu"
        if not is_on_gpu or len(algorithms) != 1:
            return Placement.REMOTE
        words = self.line.services[DRAFT]
        is_apart = any(self._is_given(words, DRAFT, flag) for flag in _APART)
        is_head = Algorithm(algorithms[0]).reads_features and not is_apart
        shares_gpus = self.num_gpus <= self.target.ranks.num_here
        return Placement.EMBEDDED if shares_gpus or is_head else Placement.REMOTE

    def _planned(self, algorithm: str, place: int) -> PlannedDraft | None:
        target = self.target
        if algorithm == "STANDALONE" and not _is_demo(target) and not self._has_draft_model:
            self.problems.append(
                "--speculative-draft-model-path: STANDALONE needs a smaller model with the same "
                "tokenizer, and the demo's draft fits the demo model alone; "
                "--speculative-algorithm NGRAM needs no model"
            )
            return None
        given = self.line.services[DRAFT]
        words = [*self._shown_shape(given, algorithm), *given]
        words.append(f"--speculative-algorithm={algorithm}")
        if self.placement is Placement.EMBEDDED:
            names = {each.flag for each in declared_fields(TargetSettings)}
            words = [
                word if word.partition("=")[0] not in names else f"--draft{word[1:]}"
                for word in words
            ]
            settings = self._read(lambda: embedded_settings(target, words, self.env))
            return self._noted("draft", settings, words)
        words = [*self._default_words(algorithm, place), *words]
        words.append(f"--target={dial_address(target.host, target.port)}")
        chosen = self._load(DraftSettings, DRAFT, words)
        if chosen is None:
            return None
        if place:
            words += [f"--port={chosen.port + 2 * place}"]
            words += [f"--maintenance-port={chosen.port + 2 * place + 1}"]
        settings = self._read(
            lambda: with_target_tokenizer(
                with_local_models(
                    load_settings(DraftSettings, service=DRAFT, arguments=words, env=self.env)
                ),
                target,
            )
        )
        is_only = len(self.launcher.algorithms or (algorithm,)) == 1
        return self._noted("draft" if is_only else f"draft-{algorithm.lower()}", settings, words)

    def _noted(
        self, name: str, settings: DraftSettings | None, words: Sequence[str]
    ) -> PlannedDraft | None:
        """Returns a draft, if its settings are right; says how many of the target's tokens one of
        another family has."""
        if settings is None:
            return None
        vocabulary = self._read(lambda: target_vocabulary(settings))
        if vocabulary is not None:
            self.notices.append(
                f"--speculative-draft-model-path: {shown_name(settings.model_folder)} has another "
                f"tokenizer than the target; it drafts {vocabulary.words()}"
            )
        return PlannedDraft(name, settings, _settled(settings, words))

    def _default_words(self, algorithm: str, place: int) -> list[str]:
        """Flags of a draft's process that the line may override."""
        found = []
        kind, target = Algorithm(algorithm), self.target
        if kind.reads_features and not _is_demo(target):
            found.append(f"--target-model-path={target.model_path}")
        free = target.ranks.num_here + place
        if kind.has_model and free < self.num_gpus and target.device == "auto":
            found.append(f"--device=cuda:{free}")
        elif kind.has_model and self.num_gpus and target.device != "cpu":
            found.append(f"--mem-fraction-static={_BESIDE_TARGET}")
        return found

    def _target_words(self, drafts: Sequence[PlannedDraft]) -> tuple[str, ...]:
        target = self.target
        words = [*_settled(target, self.line.services[TARGET])]
        if _is_demo(target) and target.served_model_name is None:
            words.append(f"--served-model-name={_DEMO_NAME}")
        if self.placement is Placement.EMBEDDED:
            for each in drafts:
                words += ["--draft=embedded", *each.arguments]
        elif self._keeps_features(drafts) and not self._is_given(
            words, TARGET, "--mem-fraction-static"
        ):
            share = _WITH_FEATURES / (1 + _FEATURES_EACH * target.dp_size)
            words.append(f"--mem-fraction-static={share:.2f}")
        return tuple(words)

    def _keeps_features(self, drafts: Sequence[PlannedDraft]) -> bool:
        """Whether the target keeps features of every token on its GPU for heads that attach."""
        has_gpu = self.num_gpus > 0 and self.target.device != "cpu"
        return has_gpu and any(each.settings.algorithm.reads_features for each in drafts)

    def _gateway_words(self) -> list[str]:
        words, target = [*self.line.services[GATEWAY]], self.target
        if not _has(words, "--tokenizer") and not _is_demo(target):
            words.append(f"--tokenizer={target.tokenizer_folder}")
        return [*words, f"--target={dial_address(target.host, target.port)}"]

    def _learner_words(self, drafts: Sequence[PlannedDraft]) -> tuple[str, ...]:
        """Returns the flags of the learner, if there is to be one; the draft says what it
        teaches."""
        launcher, target = self.launcher, self.target
        if not launcher.speculative_online_training:
            return ()
        algorithms = [each.settings.algorithm for each in drafts]
        if len(algorithms) != 1 or algorithms[0] not in TAUGHT:
            names = ", ".join(each.value for each in algorithms) or NO_DRAFT
            self.problems.append(
                f"--speculative-online-training: one draft by "
                f"{', '.join(each.value for each in TAUGHT)} can be taught; "
                f"--speculative-algorithm names {names}"
            )
            return ()
        [draft] = (each.settings for each in drafts)
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
        tls = [
            each for each in declared_fields(DraftSettings) if each.name.startswith("target_tls_")
        ]
        given = [(each.flag, getattr(draft, each.name)) for each in tls]
        words += [f"{flag}={value}" for flag, value in given if value is not None]
        self._load(LearnerSettings, "learner", words)
        return tuple(words)

    def _note_unused(self) -> None:
        unused = [word.partition("=")[0] for word in self.line.services[DRAFT]]
        unused = [flag for flag in unused if flag.startswith("--speculative")]
        if unused:
            self.notices.append(f"{', '.join(unused)}: no effect: {NO_DRAFT} starts no draft")


def dial_address(host: str, port: int) -> str:
    """Returns where a server of this host is dialled from this host."""
    return f"{LOOPBACK if host in _ANY_ADDRESS else host}:{port}"


def _is_demo(target: TargetSettings) -> bool:
    return target.model_path.resolve() == DEMO_MODEL.resolve()


def _settled(settings: object, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags with paths on this machine in place of ids on the Hub."""
    models = [each for each in declared_fields(type(settings)) if each.is_model]
    dropped = {*_REVISIONS, *(each.flag for each in models)}
    kept = [word for word in words if word.partition("=")[0] not in dropped]
    kept += [
        f"{each.flag}={value}"
        for each in models
        if (value := getattr(settings, each.name)) not in (None, each.default)
    ]
    return tuple(kept)


def _add_certs(launcher: LauncherSettings, line: Line) -> None:
    """Spells `--certs` out as the flags of each service, before those of the line."""
    if launcher.certs is None:
        return
    folder = CertFolder(launcher.certs.resolve())
    server, client = folder.server_tls(), folder.client_tls()
    of_servers = [f"--tls-cert={server.cert}", f"--tls-key={server.key}"]
    of_servers.append(f"--tls-client-ca={folder.ca}")
    of_clients = [f"--target-tls-ca={client.ca}", f"--target-tls-cert={client.cert}"]
    of_clients.append(f"--target-tls-key={client.key}")
    line.services[TARGET][:0] = of_servers
    for service in (DRAFT, GATEWAY):
        line.services[service][:0] = [*of_servers, *of_clients]


def _add_graph_sizes(launcher: LauncherSettings, line: Line) -> None:
    if launcher.cuda_graph_bs:
        most = min(max(launcher.cuda_graph_bs), _MOST_GRAPH_SEQUENCES)
        line.services[TARGET].insert(0, f"--cuda-graph-max-bs={most}")


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


def _port_problems(plan: Plan) -> list[str]:
    drafts = [each.settings for each in plan.remote_drafts]
    services: list[GatewaySettings | TargetSettings | DraftSettings] = [
        *(plan.gateway, plan.target),
        *drafts,
    ]
    ports = [port for each in services for port in (each.port, each.admin_port)]
    zero = [f"{flag}: a launcher needs to know the port; 0 is none" for flag in _zero(plan)]
    twice = sorted(port for port, count in Counter(ports).items() if count > 1 and port)
    if not twice:
        return zero
    firsts = ", ".join(str(each.port) for each in services)
    return [
        *zero,
        f"ports wanted twice: {', '.join(map(str, twice))}; each service takes two in a row, from "
        f"{firsts}: set --port, --target-port or --draft-port",
    ]


def _zero(plan: Plan) -> list[str]:
    return [flag for port, flag in plan.ports.items() if port == 0]


def _has(words: Sequence[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)
