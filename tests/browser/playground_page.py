"""The playground as a person uses it: what tests and screenshots do again and again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

SEED = 7


class PlaygroundPage:
    """One tab.

    Attributes:
        problems: what the console and the page complained of: scripts that threw, and everything
            the content policy refused.
        foreign: addresses elsewhere that the page asked for.
    """

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        width: int = 1280,
        height: int = 860,
        scheme: str = "light",
        is_phone: bool = False,
    ) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
            has_touch=is_phone,
            is_mobile=is_phone,
        )
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self._url = url
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        self.page.goto(url)

    def close(self) -> None:
        """Closes the tab and forgets what it stored."""
        self.page.context.close()

    def until_served(self) -> None:
        """Waits until the page knows the model and its drafts."""
        self.page.wait_for_selector(".dot.up")

    def set(self, **parameters: object) -> None:
        """Fills in parameters by their id, `max_tokens` for `max-tokens`."""
        if self.page.locator("#parameters").is_hidden():
            self.page.click("#parameters-toggle")
        for name, value in parameters.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.click("#parameters-toggle")

    def choose(self, algorithm: str, rival: str = "none") -> None:
        self.page.select_option("#algorithm", algorithm)
        self.page.select_option("#rival", rival)

    def never_end(self) -> None:
        """Lets answers go on past the end token: there is time to stop them, however slow."""
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(
                post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})
            ),
        )

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def until_done(self) -> None:
        """Waits until nothing is streamed."""
        self.page.wait_for_selector("#send:not([hidden])")

    def ask(self, text: str) -> Locator:
        """Sends, waits for the end, and returns the answers of that turn."""
        self.send(text)  # the page has hidden the button when the key press returns
        self.until_done()
        return self.page.locator(".turn").last.locator(".answer")

    def tokens(self, answer: Locator) -> list[tuple[str, str]]:
        """Returns (source, text) of every token shown."""
        found: Any = answer.locator(".token").evaluate_all(
            "tokens => tokens.map(each => [each.classList[1], each.textContent])"
        )
        return [(source, text) for source, text in found]

    def _on_console(self, message: Any) -> None:
        # A refused request is the network's news, not the script's.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self._url, "data:")):
            self.foreign.append(request.url)
