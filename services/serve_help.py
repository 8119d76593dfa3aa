"""`outrider serve --help`: every flag, by the process that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from services.serve_line import all_fields
from services.serve_settings import LauncherSettings
from shared.settings_help import help_text

_EPILOG = (
    "A flag that several services have belongs to the one that SGLang means by it: --host and "
    "--port are those of HTTP, --dtype and --device hold for target and draft. --target-X, "
    "--draft-X and --gateway-X set X of one service. Each flag of a service has a variable: "
    "--max-total-tokens of the target is OUTRIDER_TARGET_MAX_TOTAL_TOKENS. --config FILE.yaml "
    "holds flags by name. A flag beats the file, which beats the variable."
)


def asks_for_help(arguments: Sequence[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def serve_help() -> str:
    """Returns the text."""
    return help_text(LauncherSettings, all_fields(), program="outrider serve", epilog=_EPILOG)
