"""`outrider-gateway`: OpenAI's HTTP interface in front of one or more targets."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from shared.garbage import collect_none

if __name__ == "__main__":
    collect_none()  # no garbage collection during the imports

import uvloop

from gateway.process import serve, serve_with_workers
from gateway.settings import GatewaySettings
from shared.errors import OutriderError
from shared.hub import local_path
from shared.settings import load_settings
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Runs the gateway until SIGINT or SIGTERM."""
    try:
        settings = load_settings(
            GatewaySettings, service="gateway", arguments=sys.argv[1:], env=os.environ
        )
        folder = local_path(settings.tokenizer, flag="--tokenizer")
        settings = replace(settings, tokenizer=folder)
        configure_logs("gateway", level=settings.log_level, log_format=settings.log_format)
        uvloop.run(serve(settings) if settings.workers == 1 else serve_with_workers(settings))
    except OutriderError as error:
        sys.exit(f"outrider-gateway: {error.message}")


if __name__ == "__main__":
    main()
