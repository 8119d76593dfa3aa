"""`make screenshots`: pictures of the playground with the demo models, into docs/images/."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image

from tests.browser.chromium import chromium
from tests.browser.playground_page import SEED, PlaygroundPage
from tests.helpers.serving import EVERY_ROUND_HAS_A_TREE, ROOT, serving

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 100_000
QUESTION = "Write a short story about a dog."
# A small bushy tree shows on a picture what a tree is; the demo draft's own is a chain.
SHAPE = {
    "OUTRIDER_DRAFT_SPECULATIVE_NUM_STEPS": "3",
    "OUTRIDER_DRAFT_SPECULATIVE_EAGLE_TOPK": "3",
    "OUTRIDER_DRAFT_SPECULATIVE_NUM_DRAFT_TOKENS": "10",
}

OpenTab = Callable[..., PlaygroundPage]


def take_trees(open_tab: OpenTab) -> None:
    """Takes the pictures of one answer and its trees."""
    tab = _asked(open_tab(height=850))
    _point_at_a_node(tab)
    _save(tab, "playground-light.png")
    _save(_asked(open_tab(width=360, height=740)), "playground-phone.png")


def take_answers(open_tab: OpenTab) -> None:
    """Takes the picture of two answers side by side."""
    _save(_asked(open_tab(height=850), rival="off"), "playground-compare.png")


def _asked(tab: PlaygroundPage, rival: str = "none") -> PlaygroundPage:
    tab.until_served()
    tab.set(seed=SEED)
    tab.choose("STANDALONE", rival)
    tab.ask(QUESTION)
    return tab


def _point_at_a_node(tab: PlaygroundPage) -> None:
    """Chooses the round that accepted most, and its second node."""
    best = tab.page.evaluate(
        """() => {
            const counts = {};
            for (const token of document.querySelectorAll(".token.accepted")) {
                counts[token.dataset.round] = (counts[token.dataset.round] ?? 0) + 1;
            }
            return Object.entries(counts).sort((one, other) => other[1] - one[1])[0][0];
        }"""
    )
    tab.page.locator(f'.token[data-round="{best}"]').first.click()
    tab.page.locator("#tree .node.accepted").nth(1).hover()


def _save(tab: PlaygroundPage, name: str) -> None:
    path = IMAGES / name
    with Image.open(io.BytesIO(tab.page.screenshot())) as picture:
        # A page has few colours: a palette says them all in a third of the bytes.
        picture.convert("RGB").quantize(40, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path} has {size:,} bytes; {MAX_BYTES:,} are allowed"
    print(f"{path.relative_to(ROOT)}  {size:,} bytes")


def _with_demo(take: Callable[[OpenTab], None], env: Mapping[str, str]) -> bool:
    flags = ("--algorithm", "STANDALONE,NGRAM")
    env = {**EVERY_ROUND_HAS_A_TREE, **env}
    with (
        tempfile.TemporaryDirectory() as logs,
        serving(Path(logs), *flags, env=env) as (_, ready_line, base_url),
        chromium() as browser,
    ):
        if not ready_line.startswith("ready: "):
            print("the demo does not come up", file=sys.stderr)
            return False
        take(lambda **options: PlaygroundPage(browser, f"{base_url}/", **options))
    return True


def main() -> int:
    """Returns 0 when every picture is written."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    taken = _with_demo(take_answers, {}) and _with_demo(take_trees, SHAPE)
    return 0 if taken else 1


if __name__ == "__main__":
    sys.exit(main())
