"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.limits import RequestLimits
from shared.settings import ProcessSettings, setting

DEMO_MODEL = Path(__file__).parents[1] / "shared" / "demo" / "target"
_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ProcessSettings):
    """What `outrider-gateway` can be told."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port of HTTP", minimum=0, maximum=65535)
    maintenance_host: str = setting("127.0.0.1", "address of AdminService")
    maintenance_port: int | None = setting(
        None, "port of AdminService; one above the port", minimum=0, maximum=65535
    )

    target: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "host:port of a target; repeat the flag for several"
    )
    target_maintenance: tuple[str, ...] = setting(
        (), "host:port of a target's maintenance port, for /flush_cache; repeat for several"
    )
    tokenizer: Path = setting(
        DEMO_MODEL, "folder with tokenizer.json, chat template and generation_config.json"
    )
    model_name: str | None = setting(None, "name clients pass as `model`; the targets' own")
    api_key: str | None = setting(None, "key requests must carry; none when unset", is_secret=True)

    retry_window_s: float = setting(
        5.0, "wait for another target when one is lost before its first answer", minimum=0.0
    )
    drain_grace_s: float = setting(30.0, "time running requests get at SIGTERM", minimum=0.0)

    max_body_bytes: int = setting(
        _LIMITS.max_body_bytes, "largest request body", minimum=1024, maximum=2**30
    )
    max_choices: int = setting(_LIMITS.max_choices, "largest `n`", minimum=1)
    max_prompts: int = setting(_LIMITS.max_prompts, "prompts of one completion", minimum=1)
    max_generations: int = setting(_LIMITS.max_generations, "`n` times prompts", minimum=1)
    max_stop_strings: int = setting(_LIMITS.max_stop_strings, "entries of `stop`", minimum=0)
    max_unread_tokens: int = setting(
        _LIMITS.max_unread_tokens,
        "tokens kept for a client that reads too slowly; beyond it is cancelled",
        minimum=1,
    )

    @property
    def admin_port(self) -> int:
        """The maintenance port, resolved."""
        if self.maintenance_port is not None:
            return self.maintenance_port
        return self.port + 1 if self.port else 0

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            max_body_bytes=self.max_body_bytes,
            max_choices=self.max_choices,
            max_prompts=self.max_prompts,
            max_generations=self.max_generations,
            max_stop_strings=self.max_stop_strings,
            max_unread_tokens=self.max_unread_tokens,
        )
