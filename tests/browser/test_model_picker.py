"""Several models behind one gateway: the page asks the one that is chosen, and remembers it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import OpenTab
from tests.browser.playground_page import SEED, PlaygroundPage

pytestmark = pytest.mark.browser

MOON = "Tell me something about the moon."


def _asked_model(tab: PlaygroundPage) -> Any:
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        answer = tab.ask(MOON)
    model = sent.value.post_data_json["model"]
    assert f" · {model} · " in answer.locator("footer").inner_text()
    return model


def _offered(tab: PlaygroundPage, select: str) -> list[str]:
    return tab.page.locator(f"{select} option").all_inner_texts()


def test_the_chosen_model_answers_and_is_remembered(open_tab: OpenTab, several_url: str) -> None:
    tab = open_tab(several_url)
    tab.until_served()
    tab.set(seed=SEED, max_tokens=8)
    assert _offered(tab, "#model") == ["bare", "demo"]
    assert _asked_model(tab) == "bare"
    tab.page.select_option("#model", "demo")
    assert _asked_model(tab) == "demo"
    tab.page.reload()
    tab.until_served()
    assert tab.page.input_value("#model") == "demo"
    tab.set(max_tokens=8)
    assert _asked_model(tab) == "demo"


def test_drafts_are_offered_of_the_chosen_model_alone(open_tab: OpenTab, several_url: str) -> None:
    tab = open_tab(several_url)
    tab.until_served()
    assert _offered(tab, "#algorithm") == ["any draft", "off"]
    assert tab.page.locator("#server").inner_text() == "no draft"
    tab.page.select_option("#model", "demo")
    assert _offered(tab, "#algorithm") == ["any draft", "NGRAM", "STANDALONE", "off"]
    assert tab.page.locator("#server").inner_text() == "NGRAM, STANDALONE"


def test_keys_choose_a_model(open_tab: OpenTab, several_url: str) -> None:
    tab = open_tab(several_url)
    tab.until_served()
    page = tab.page
    page.focus("#prompt")
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "model":
            break
    assert page.evaluate("document.activeElement.labels[0].textContent.trim()").startswith("Model")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    assert page.input_value("#model") == "demo"


def test_a_model_that_is_away_is_chosen_again_when_it_is_back(
    open_tab: OpenTab, several_url: str
) -> None:
    tab = open_tab(several_url)
    tab.until_served()
    page = tab.page
    page.select_option("#model", "demo")
    away = {"object": "list", "data": [{"id": "bare"}, {"id": "other"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=away))
    page.reload()
    tab.until_served()
    assert page.input_value("#model") == "bare"
    page.unroute("**/v1/models")
    page.reload()
    tab.until_served()
    assert page.input_value("#model") == "demo"


def test_a_phone_has_the_picker_in_sight(open_tab: OpenTab, several_url: str) -> None:
    tab = open_tab(several_url, width=360, height=740)
    long = [{"id": "demo"}, {"id": "an-organization/a-model-with-a-very-long-name-70B-Instruct"}]
    models = {"object": "list", "data": long}
    tab.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    tab.page.reload()
    tab.until_served()
    tab.page.select_option("#model", str(long[1]["id"]))
    box = tab.page.locator("#model").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    assert box["height"] >= 24  # WCAG 2.2, 2.5.8
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360


def test_one_model_needs_no_picker(tab: PlaygroundPage) -> None:
    assert tab.page.locator("#model").is_hidden()
    assert tab.page.locator("#server").inner_text() == "demo · NGRAM, STANDALONE"
