"""What the documents name exists: links, make targets, flags, variables, files, modules, RPCs,
routes, metrics and error reasons.

Each rule takes a page and returns what is wrong with it, so that it can be shown to fail: every
rule is given a page that breaks it.
"""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import json_format, message_factory

from gateway.schema import ChatCompletionRequest
from gateway.settings import GatewaySettings
from services.draft.learner.settings import LearnerSettings
from services.draft.settings import DraftSettings
from services.draft.training.commands import parser as training_parser
from services.serve_line import Line, split_line
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.settings import load_settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_WORDS = 18_500  # of all pages in docs/

SERVICES = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "gateway": GatewaySettings,
    "learner": LearnerSettings,
}

# Flags of other people's programs that the documents call.
FOREIGN_FLAGS = {
    "bash": {"--idle"},
    "buf": {"--protocol", "--http2-prior-knowledge"},
    "curl": {"--cacert"},
    "docker": {"--build", "--scale"},
    "mypy": {"--strict"},
    "pip": {"--no-index", "--no-deps", "--target"},
    "podman": {"--format"},
    "smg": {"--worker-urls"},
    "torchrun": {"--nproc-per-node"},
}

# Variables that no flag of one service stands behind.
COMMON_VARIABLES = {"OUTRIDER_LOG_LEVEL", "OUTRIDER_LOG_FORMAT", "OUTRIDER_OTLP_ENDPOINT"}

# What runs the commands of the documents, by how they begin.
RUN_BY = {
    r"make (setup|check|test|test-kernels|fuzz)\b": ".ci/run",
    r"\.ci/run$|\.ci/run ": "tests/test_makefile.py",
    r"make serve\b": "tests/test_makefile.py",
    r"make demo\b": "tests/gateway/test_process.py",
    r"make certs\b": "tests/services/test_certs.py",
    r"make bench-async ARGS=": "tests/bench/test_ahead_flags.py",
    r"make load-(target|draft|gateway)\b": "tests/load/test_programs.py",
    r"make tune\b": "tests/tune/test_tune.py",
    r"python -m tests\.bench ": "tests/bench/test_choose.py",
    r"outrider serve ": "tests/integration/test_launch_lines.py",
    r"outrider (target|draft|gateway) ": "tests/integration/test_serve.py",
    r"outrider learner ": "tests/integration/test_learner.py",
    r"curl ": "tests/integration/test_serve.py",
    r"pip install '\.\[gateway": "tests/test_wheel.py",
    r"docker compose ": "tests/docker/test_compose.py",
    r"grpcurl |rows=": "tests/shared/rpc/test_server.py",
    r"pip install smg && smg launch ": "tests/clients/with_smg.py",
    r'-m services\.draft\.training"$|\$T ': "tests/services/draft/training/test_trainer.py",
}

# Routes that the web framework adds.
FRAMEWORK_ROUTES = {"GET /docs", "GET /openapi.json"}

_FOLDERS = r"docker|docs|gateway|packaging|protos|services|shared|tests|\.ci"


@dataclass(frozen=True, slots=True)
class Page:
    """A document.

    Attributes:
        path: where it lies, for its relative links.
        text: Markdown.
    """

    path: Path
    text: str

    @property
    def code(self) -> str:
        """The text between fences and between backticks, one piece a line."""
        fence = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
        return "\n".join(
            [*fence.findall(self.text), *re.findall(r"`([^`\n]+)`", fence.sub("", self.text))]
        )


@functools.cache
def _pages() -> tuple[Page, ...]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    result = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in result.stdout.split())
    return tuple(Page(path, path.read_text()) for path in paths if path.exists())


@functools.cache
def _source(pattern: str = "*.py") -> str:
    """The text of the product and of its programs. Tests are left out: they may name what is
    refused."""
    folders = (ROOT / name for name in ("gateway", "services", "shared", "protos", "tests"))
    files = (path for folder in folders for path in sorted(folder.rglob(pattern)))
    return "\n".join(path.read_text() for path in files if not path.name.startswith("test_"))


@functools.cache
def _flags_of_services() -> dict[str, list[str]]:
    """Flags by service, from their page; a test of its own holds that page to the settings."""
    text = (DOCS / "flags.md").read_text()
    parts = re.findall(r"^## ([^\n]+)$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    flags = {name: re.findall(r"`(--[a-z0-9-]+)`", table) for name, table in parts}
    common = flags.pop("All services")
    of_sglang = flags.pop("Accepted from SGLang by `outrider serve`")
    own = {name.strip("`").removeprefix("outrider "): flags[name] for name in flags}
    services = {name: [*common, *own[name]] for name in own if name != "serve"}
    # The launcher takes the flags of all, and `--target-X` for X of one.
    each = [(name, flag) for name, found in services.items() for flag in found]
    launcher = [*own["serve"], *of_sglang, "--config", *(flag for _, flag in each)]
    launcher += [f"--{name}{flag[1:]}" for name, flag in each]
    return {**services, "serve": launcher, "check": launcher}


@functools.cache
def _flags() -> frozenset[str]:
    services = (flag for flags in _flags_of_services().values() for flag in flags)
    programs = re.findall(r"""["'](--[a-z0-9-]+)["']""", _source())
    foreign = (flag for flags in FOREIGN_FLAGS.values() for flag in flags)
    return frozenset([*services, *programs, *foreign])


@functools.cache
def _variables() -> frozenset[str]:
    named = (
        f"OUTRIDER_{service}{flag.replace('--', '-')}".upper().replace("-", "_")
        for service, flags in _flags_of_services().items()
        for flag in flags
    )
    return frozenset([*COMMON_VARIABLES, *named])


@functools.cache
def _anchors(path: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return frozenset(heading.replace(" ", "-") for heading in kept)


@functools.cache
def _rpcs() -> frozenset[str]:
    """`Service/Method` of every contract."""
    services = re.findall(
        r"^service (\w+) \{(.*?)^\}", _source("*.proto"), re.DOTALL | re.MULTILINE
    )
    return frozenset(
        f"{service}/{method}"
        for service, body in services
        for method in re.findall(r"rpc (\w+)", body)
    )


@functools.cache
def _routes() -> frozenset[str]:
    """`METHOD /path` of the gateway, without what stands in braces."""
    decorators = re.findall(r"@app\.(get|post|delete)\(\s*\"(/[^\"{]*)", _source())
    return frozenset([*FRAMEWORK_ROUTES, *(f"{how.upper()} {path}" for how, path in decorators)])


def broken_links(page: Page) -> Iterator[str]:
    """Links to a file or a heading that is not there."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = page.path.parent / name if name else page.path
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            yield link


def unknown_targets(page: Page) -> Iterator[str]:
    """`make X` without a target X."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    named = re.findall(r"(?<![\w-])make ([a-z][a-z0-9-]*)", page.code)
    yield from (f"make {target}" for target in named if target not in targets)


def unknown_flags(page: Page) -> Iterator[str]:
    """Flags that no service and no program takes."""
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w…-])", page.code)
    yield from (flag for flag in named if flag not in _flags())


@functools.cache
def _flags_of(module: str) -> frozenset[str]:
    """Flags that a program, or a module of the tests that it imports, writes down."""
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    imported = re.findall(r"^\s*(?:from|import) (tests\.\w+\.\w+)", file.read_text(), re.MULTILINE)
    files = [file, *(ROOT / f"{name.replace('.', '/')}.py" for name in imported)]
    text = "\n".join(path.read_text() for path in files if path.exists())
    return frozenset(re.findall(r"""["'](--[a-z0-9-]+)["']""", text))


def _modules_of(target: str) -> list[str]:
    """The programs that a make target runs with the flags of `ARGS`."""
    recipe = re.search(
        rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    return re.findall(r"\$\(PY\) -m ([\w.]+) .*\$\(ARGS\)", recipe[1]) if recipe else []


def flags_of_other_programs(page: Page) -> Iterator[str]:
    """Commands with a flag that exists, but not for the program that is called."""
    for command in re.sub(r"\s*\\\n\s*", " ", page.code).splitlines():
        outside_quotes = re.sub(r"'[^']*'", "", command)
        flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w…-])", outside_quotes)
        own: set[str] = {"--help"}
        if service := re.match(r"outrider[- ](target|draft|gateway|learner|serve|check) ", command):
            own |= set(_flags_of_services()[service[1]])
        elif module := re.match(r"(?:\w+=\S+ )*python3? -m (tests[\w.]+)", command):
            own |= _flags_of(module[1])
        elif target := re.match(r"(?:\w+=\S+ )*make ([\w-]+) .*ARGS=", command):
            modules = _modules_of(target[1])
            own |= {flag for module in modules if module != "pytest" for flag in _flags_of(module)}
        else:
            continue
        yield from (f"{command}: {flag}" for flag in flags if flag not in own)


def unknown_variables(page: Page) -> Iterator[str]:
    """Environment variables that no setting reads."""
    named = re.findall(r"OUTRIDER_[A-Z0-9_]+(?![A-Z0-9_…])", page.code)
    yield from (name for name in named if name not in _variables())


def missing_files(page: Page) -> Iterator[str]:
    """Files and folders of the repository that are not there; `*` stands for any name."""
    for name in re.findall(rf"(?<![\w./:-])((?:{_FOLDERS})/[\w./*-]*\w)", page.code):
        if not any(ROOT.glob(name)):
            yield name


def missing_modules(page: Page) -> Iterator[str]:
    """`python -m X` where X is in the repository's folders and not there."""
    for name in re.findall(rf"-m ((?:{_FOLDERS})(?:\.\w+)*)", page.code):
        path = ROOT / name.replace(".", "/")
        if not path.with_suffix(".py").exists() and not path.is_dir():
            yield name


def unknown_rpcs(page: Page) -> Iterator[str]:
    """`Service/Method` that no contract has."""
    named = re.findall(r"(?<!\w)([A-Z]\w+(?:Service|Engine))[/.]([A-Z]\w+)", page.code)
    calls = (f"{service}/{method}" for service, method in named)
    yield from (call for call in calls if call not in _rpcs())


def refused_commands(page: Page) -> Iterator[str]:
    """Commands of a service that would not start it, for a flag's value or for what is missing."""
    for command in re.sub(r"\s*\\\n\s*", " ", page.code).splitlines():
        named = re.match(r"outrider[- ](target|draft|gateway|learner|serve) (?=--)", command)
        if named is None:
            continue
        flags = re.sub(r"--config \S+", "", command.removeprefix(named[0]))
        words = shlex.split(flags, comments=True)
        line = split_line(words) if named[1] == "serve" else Line(services={named[1]: words})
        try:
            for service, own in line.services.items():
                load_settings(SERVICES[service], service=service, arguments=own, env={})
        except SettingsError as error:
            line.problems.extend(error.problems)
        yield from (f"{command}: {problem}" for problem in line.problems)


def refused_messages(page: Page) -> Iterator[str]:
    """Bodies of `grpcurl -d` that are no message of the method that is called."""
    calls = re.findall(r"grpcurl [^\n]*-d '([^']*)'[^/]*?([\w.]+)/(\w+)", page.code)
    heredocs = re.findall(
        r"grpcurl [^\n]*-d @ [^/]*?([\w.]+)/(\w+) <<END\n(.*?)END", page.code, re.DOTALL
    )
    for body, service, method in [*calls, *((body, *call) for *call, body in heredocs)]:
        package, _, name = service.rpartition(".")
        stem = package.split(".")[1]
        module = importlib.import_module(f"shared.pb.{package}.{stem}_service_pb2")
        request = module.DESCRIPTOR.services_by_name[name].methods_by_name[method].input_type
        try:
            json_format.Parse(body.replace("$rows", ""), message_factory.GetMessageClass(request)())
        except json_format.ParseError as error:
            yield f"{service}/{method}: {error}"


def refused_chats(page: Page) -> Iterator[str]:
    """Bodies of `curl` to the chat route that the gateway would refuse, or ignore in part."""
    for body in re.findall(
        r"curl [^\n]*/v1/chat/completions.*?-d '(\{.*?\})'", page.code, re.DOTALL
    ):
        chat = ChatCompletionRequest.model_validate_json(body)
        yield from (f"{name} in {body}" for name in chat.model_extra or {})


def refused_training(page: Page) -> Iterator[str]:
    """Commands of the trainer, as the page on training abbreviates them, that it would refuse."""
    for words in re.findall(r"^\$T ([^\n]+)", re.sub(r"\s*\\\n\s*", " ", page.code), re.MULTILINE):
        try:
            training_parser("").parse_args(shlex.split(words))
        except SystemExit:
            yield words


def commands_that_nothing_runs(page: Page) -> Iterator[str]:
    """Commands of the pages for users that no test and no part of `.ci/run` runs."""
    if page.path.parent == DOCS or page.path.parent == ROOT:
        runs = [re.compile(pattern) for pattern, path in RUN_BY.items() if (ROOT / path).exists()]
        commands = (
            command for command in _commands(page) if not any(r.match(command) for r in runs)
        )
        yield from commands


def _commands(page: Page) -> Iterator[str]:
    """Yields each command of the shell blocks on one line, without variables before it."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.text, re.DOTALL | re.MULTILINE):
        text = re.sub(r"<<END\n.*?\nEND", "", re.sub(r"\s*\\\n\s*", " ", block), flags=re.DOTALL)
        text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)
        for line in text.splitlines():
            command = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", line.strip())
            if command and not command.startswith("#"):
                yield command


def unknown_routes(page: Page) -> Iterator[str]:
    """`GET /path` that the gateway does not answer."""
    named = re.findall(r"(?<!\w)((?:GET|POST|DELETE) /[\w./]+)", page.code)
    yield from (route for route in named if route not in _routes())


def unknown_metrics(page: Page) -> Iterator[str]:
    """Metrics of ours that no service declares."""
    for name in re.findall(r"outrider_(?:target|draft|gateway)_(\w*[a-z])", page.code):
        if re.sub(r"(_seconds)?(_total)?$", "", name) not in _source():
            yield name


def unknown_reasons(page: Page) -> Iterator[str]:
    """Reasons of errors, which stand in the first column of a table, that nothing raises."""
    cells = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \|", page.text, re.MULTILINE)
    named = re.findall(r"`([A-Z]+_[A-Z_]+)`", "".join(cells))
    yield from (reason for reason in named if f'"{reason}"' not in _source())


Rule = Callable[[Page], Iterator[str]]

# Each rule with a page that breaks it.
RULES: dict[Rule, str] = {
    broken_links: "[a page](nowhere.md)",
    unknown_targets: "`make nonsense`",
    unknown_flags: "```sh\noutrider-target --nonsense-flag\n```",
    flags_of_other_programs: "```sh\noutrider draft \\\n  --max-queued-requests 1\n```",
    unknown_variables: "`OUTRIDER_TARGET_NONSENSE`",
    missing_files: "`services/nonsense.py`",
    missing_modules: "`python -m services.nonsense`",
    unknown_rpcs: "`TargetService/Nonsense`",
    refused_commands: "`outrider serve --tp-size 0`",
    refused_messages: "`grpcurl -d '{\"no\": 1}' outrider.draft.v1.DraftService/ProposeTree`",
    refused_training: "```sh\n$T train --nonsense\n```",
    commands_that_nothing_runs: "```sh\noutrider nonsense\n```",
    refused_chats: '```\ncurl :1/v1/chat/completions -d \'{"messages": [], "nonsense": 1}\'\n```',
    unknown_routes: "`GET /nonsense`",
    unknown_metrics: "`outrider_target_nonsense_total`",
    unknown_reasons: "| `NONSENSE_REASON` | never |",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_the_documents_name_exists(rule: Rule) -> None:
    wrong = {f"{page.path.relative_to(ROOT)}: {name}" for page in _pages() for name in rule(page)}
    assert wrong == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_finds_what_is_missing(rule: Rule) -> None:
    assert list(rule(Page(DOCS / "page.md", RULES[rule])))


def test_a_link_to_a_missing_heading_is_found() -> None:
    page = Page(DOCS / "page.md", "[here](README.md#documentation) [there](README.md#nowhere)")
    assert list(broken_links(page)) == ["README.md#nowhere"]


def test_the_index_links_every_page() -> None:
    links = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text()))
    assert links == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


def test_the_documents_stay_short() -> None:
    text = "\n".join(path.read_text() for path in DOCS.glob("*.md"))
    words = [piece for piece in text.split() if any(map(str.isalnum, piece))]
    assert len(words) <= MOST_WORDS
