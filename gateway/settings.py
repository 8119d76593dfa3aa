"""Settings of the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.api_keys import (
    ANONYMOUS,
    ApiKey,
    KeyLimits,
    check_keys,
    keys_from_file,
    keys_from_texts,
)
from gateway.output.style import (
    REASONING_SYNONYMS,
    TOOL_SYNONYMS,
    ReasoningParser,
    ToolCallParser,
)
from shared.errors import SettingsError, raise_problems
from shared.settings import DialingSettings, address_problems, setting, tls_problems
from shared.text import MAX_PROMPT_CHARACTERS
from shared.tls import ServerTls, checked_server_tls

DEMO_MODEL = Path(__file__).parents[1] / "shared" / "demo" / "target"
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(DialingSettings):
    """Settings of `outrider-gateway`."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port of HTTP", minimum=0, maximum=65535)
    maintenance_host: str = setting("127.0.0.1", "address of AdminService")
    maintenance_port: int | None = setting(
        None, "port of AdminService; the port plus one when unset", minimum=0, maximum=65535
    )

    http_client_ca: Path | None = setting(
        None, "certificate authority of HTTP clients (PEM), which must then present a certificate"
    )

    workers: int = setting(
        1,
        "processes behind the port; each enforces the limits of keys on its own",
        minimum=1,
        maximum=64,
    )

    target: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "HOST:PORT of a target, or unix:PATH; repeat the flag for several"
    )
    target_maintenance: tuple[str, ...] = setting(
        (), "HOST:PORT of a target's maintenance port; repeat for several; port plus one when unset"
    )
    remote_operators: bool = setting(
        False, "operators' keys may change weights and pause generation from other hosts, too"
    )
    tokenizer: Path = setting(
        DEMO_MODEL,
        "folder with tokenizer.json, chat template and generation_config.json, or an id on the Hub",
        aliases=("tokenizer-path",),
        is_model=True,
    )
    tool_call_parser: ToolCallParser = setting(
        ToolCallParser.AUTO,
        "format of the model's tool calls; auto: detected from its template",
        synonyms=TOOL_SYNONYMS,
    )
    reasoning_parser: ReasoningParser = setting(
        ReasoningParser.AUTO,
        "format of the model's reasoning; auto: detected from its template",
        synonyms=REASONING_SYNONYMS,
    )
    model_name: str | None = setting(
        None, "name that clients pass as `model`; the targets' when unset"
    )
    model_alias: tuple[str, ...] = setting(
        (), "further name of the model, for clients that insist on one; repeat for several"
    )

    api_key: tuple[str, ...] = setting(
        (),
        "KEY or NAME:KEY of a client; repeat for several; no key is needed when unset",
        is_secret=True,
    )
    api_key_file: Path | None = setting(
        None, "TOML file with a table [keys.NAME] for each key: key or key_sha256, and limits"
    )
    key_requests_per_minute: int | None = setting(
        None,
        "POST and PUT requests a minute for each key, or for all clients if there are no keys",
        minimum=1,
    )
    key_tokens_per_minute: int | None = setting(
        None, "prompt and output tokens a minute for each key", minimum=1
    )
    key_max_concurrent: int | None = setting(None, "open requests for each key", minimum=1)
    never_learn_from: tuple[str, ...] = setting(
        (),
        "name of a key whose requests no draft may learn from; `anonymous` if no keys are set; "
        "repeat for several",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "site that may call the gateway (https://app.example); repeat for several; none when unset",
    )

    response_store: str = setting(
        "off", "where responses and conversations are kept: off, memory, or an SQLite file"
    )
    response_store_bytes: int = setting(
        256 * 2**20, "most bytes stored; the oldest entries are deleted first", minimum=2**20
    )
    response_store_hours: float = setting(
        30 * 24.0, "time that an entry is kept after its last change", minimum=0.001
    )

    retry_window_s: float = setting(
        5.0, "how long a request that has not started waits for another target", minimum=0.0
    )
    request_timeout_s: float | None = setting(
        None,
        "longest time of a request on a target, queueing included; unbounded when unset",
        minimum=0.001,
    )
    drain_grace_s: float = setting(
        30.0, "time that running requests get to finish after SIGTERM", minimum=0.0
    )

    max_connections: int = setting(8192, "HTTP connections open at once", minimum=1)
    max_header_bytes: int = setting(
        64 * 1024, "request line and headers of a request", minimum=1024
    )
    header_timeout_s: float = setting(15.0, "time the headers of a request may take", minimum=0.001)
    body_timeout_s: float = setting(60.0, "time the body of a request may take", minimum=0.001)
    max_buffered_bytes: int = setting(
        256 * 2**20, "bodies that are not complete yet, all together", minimum=1024
    )
    max_body_bytes: int = setting(16 * 2**20, "largest request body", minimum=1024, maximum=2**30)
    max_prompt_characters: int = setting(
        MAX_PROMPT_CHARACTERS, "longest prompt in characters", minimum=1
    )
    max_template_characters: int = setting(
        0, "longest `chat_template` of a request; 0 refuses any", minimum=0
    )
    max_choices: int = setting(128, "largest `n`", minimum=1)
    max_prompts: int = setting(1024, "most prompts of one completion", minimum=1)
    max_generations: int = setting(1024, "largest `n` times prompts", minimum=1)
    max_stop_strings: int = setting(16, "most entries of `stop`", minimum=0)
    max_unread_tokens: int = setting(
        8192, "most unread tokens of a slow client; its request is then cancelled", minimum=1
    )

    def __post_init__(self) -> None:
        problems = tls_problems(self, lambda: self.http_tls)
        problems += address_problems("--target", self.target)
        problems += address_problems("--target-maintenance", self.target_maintenance)
        try:
            check_keys(self.api_keys)
            problems += self._unknown_names()
        except SettingsError as error:
            problems += error.problems
        problems += tuple(
            f"--cors-origin is {origin!r}; it must be * or a scheme, host and port, without a path"
            for origin in self.cors_origin
            if not _ORIGIN.fullmatch(origin)
        )
        if self.remote_operators and not (self.api_key or self.api_key_file):
            problems += ("--remote-operators is set without API keys: anybody is one then",)
        if self.workers > 1 and self.response_store == "memory":
            problems += ("--response-store memory is one process's; --workers above 1 need a file",)
        if self.round_log is not None:
            problems += ("--round-log is set; a gateway takes no steps: set it at targets, drafts",)
        raise_problems(problems)

    def _unknown_names(self) -> tuple[str, ...]:
        keys = [key.name for key in self.api_keys] or [ANONYMOUS]
        return tuple(
            f"--never-learn-from is {name!r}; the keys are {', '.join(keys)}"
            for name in self.never_learn_from
            if name not in keys
        )

    @property
    def http_tls(self) -> ServerTls | None:
        """TLS of the HTTP port: the shared server certificate, with a separate client authority."""
        return checked_server_tls(
            self.tls_cert, self.tls_key, self.http_client_ca, ca_flag="--http-client-ca"
        )

    @property
    def maintenance_addresses(self) -> tuple[str, ...]:
        """The targets' maintenance ports, resolved."""
        if self.target_maintenance:
            return self.target_maintenance
        targets = (address.rpartition(":") for address in dict.fromkeys(self.target))
        return tuple(
            f"{host}:{int(port) + 1}"
            for host, _, port in targets
            if host != "unix" and port.isdigit()
        )

    @property
    def admin_port(self) -> int:
        """The maintenance port, resolved."""
        if self.maintenance_port is not None:
            return self.maintenance_port
        return self.port + 1 if self.port else 0

    @property
    def key_limits(self) -> KeyLimits:
        """Default limits of API keys."""
        return KeyLimits(
            self.key_requests_per_minute, self.key_tokens_per_minute, self.key_max_concurrent
        )

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """Raises:
        SettingsError: a key or its file is wrong.
        """
        keys = keys_from_texts(self.api_key, self.key_limits)
        if self.api_key_file is None:
            return keys
        return keys + keys_from_file(self.api_key_file, self.key_limits)
