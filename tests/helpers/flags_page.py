"""Writes `docs/flags.md` from the settings themselves: `python -m tests.helpers.flags_page`."""

from __future__ import annotations

from pathlib import Path

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.target.settings import TargetSettings
from shared.settings_field import Field, declared_fields

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
ROOT = str(PAGE.parents[1])
_SERVICES = {"target": TargetSettings, "draft": DraftSettings, "gateway": GatewaySettings}
_INTRODUCTION = """# Flags

Written by `python -m tests.helpers.flags_page`; a test fails when a setting is missing. A flag
beats its environment variable, which beats the default. The variable of the target's
`--max-total-tokens` is `OUTRIDER_TARGET_MAX_TOTAL_TOKENS`; `OUTRIDER_LOG_LEVEL` and
`OUTRIDER_LOG_FORMAT` hold for every service. Every bad setting is reported at once, by name.
`GetServerInfo` shows what is in force. With `--draft embedded` the target takes the draft's flags
as well. A flag that both have is then the target's, and `OUTRIDER_DRAFT_…` sets the draft's; device
and dtype are shared, and so is the page size unless `OUTRIDER_DRAFT_PAGE_SIZE` is set.
"""


def page() -> str:
    """Returns the page's text."""
    parts = [_INTRODUCTION]
    for service, settings in _SERVICES.items():
        rows = "\n".join(_row(field) for field in declared_fields(settings))
        parts.append(
            f"\n## `outrider-{service}`\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n"
        )
    return "".join(parts)


def _row(field: Field) -> str:
    default = "required" if field.is_required else field.render(field.default)
    # Paths below the checkout read the same on every machine.
    default = default.replace(f"{ROOT}/", "")
    limits = "" if field.expectation in ("", "not empty") else f" ({field.expectation})"
    text = f"{field.help}{limits}".replace("|", "\\|")
    return f"| `{field.flag}` | {f'`{default}`' if default else ''} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page())
