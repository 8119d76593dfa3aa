"""The playground with the demo models behind it: what is shown is what the API says."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from typing import Any

import pytest

from tests.browser.conftest import KEY, OpenTab
from tests.browser.playground_page import SEED, PlaygroundPage
from tests.helpers.serving import ROOT

pytestmark = pytest.mark.browser

MOON = "Tell me something about the moon."
STORY = "Write a short story about a dog."


def _api(url: str, question: str, **speculation: object) -> Any:
    """The same request as the page's, answered whole."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "seed": SEED,
        "temperature": 0.7,
        "top_p": 1,
        "max_tokens": 128,
        "speculation": speculation,
    }
    request = urllib.request.Request(
        f"{url}v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def _server_info(url: str) -> Any:
    with urllib.request.urlopen(f"{url}server_info") as response:
        return json.load(response)


def _drawn_nodes(tab: PlaygroundPage) -> Counter[str]:
    kinds: Any = tab.page.locator("#tree .node").evaluate_all(
        "nodes => nodes.map(each => each.classList[1])"
    )
    return Counter(kinds)


def test_an_answer_is_the_servers_with_every_token_marked(
    tab: PlaygroundPage, demo_url: str
) -> None:
    tab.choose("STANDALONE")
    answer = tab.ask(MOON)
    tokens = tab.tokens(answer)
    assert "".join(text for _, text in tokens) == _api(demo_url, MOON)["message"]["content"]
    sources = Counter(source for source, _ in tokens)
    assert set(sources) <= {"accepted", "bonus", "plain"}
    # The demo draft guesses some and misses some; the first step has no tree yet.
    assert sources["accepted"] > 0
    assert sources["bonus"] > 0
    footer = answer.locator("footer").inner_text()
    assert "tokens/s" in footer
    assert f"seed\u00a0{SEED}" in footer


def test_the_legend_explains_each_mark_by_more_than_colour(tab: PlaygroundPage) -> None:
    styles: Any = tab.page.locator("#legend .token").evaluate_all(
        "all => all.map(each => [each.textContent, getComputedStyle(each).borderBottomStyle])"
    )
    assert styles == [["accepted", "solid"], ["bonus", "dashed"], ["plain", "dotted"]]


def test_text_arrives_piece_by_piece_and_escape_stops_it(
    tab: PlaygroundPage, demo_url: str
) -> None:
    tab.never_end()
    tab.set(temperature=2, max_tokens=1500)
    tab.send(MOON)
    counts: list[int] = []
    for _ in range(3):
        tab.page.wait_for_function(
            "seen => document.querySelectorAll('.answer .token').length > seen",
            arg=max(counts, default=0),
        )
        counts.append(tab.page.locator(".answer .token").count())
    assert tab.page.locator("#stop").is_visible()
    assert tab.page.locator(".answer[aria-busy=true]").count() == 1
    tab.page.keyboard.press("Escape")
    tab.until_done()
    assert tab.page.locator(".answer .state").inner_text() == "stopped"
    assert tab.page.locator(".problem-box").count() == 0
    assert len(tab.tokens(tab.page.locator(".answer"))) >= counts[-1]
    deadline_s = time.monotonic() + 10.0
    while _server_info(demo_url)["targets"][0]["live_request_count"]:
        assert time.monotonic() < deadline_s, "the target still works on it"
        time.sleep(0.02)


def test_the_stop_button_ends_both_sides_of_a_comparison(tab: PlaygroundPage) -> None:
    tab.never_end()
    tab.set(temperature=2, max_tokens=1500)
    tab.choose("any", "off")
    tab.send(MOON)
    tab.page.wait_for_selector(".answer .token")
    tab.page.click("#stop")
    tab.until_done()
    assert tab.page.locator(".answer .state").all_inner_texts() == ["stopped", "stopped"]
    assert tab.page.locator(".verdict").inner_text() == ""


def test_a_chosen_token_shows_its_rounds_tree(tab: PlaygroundPage, demo_url: str) -> None:
    tab.choose("STANDALONE")
    answer = tab.ask(MOON)
    rounds = _api(demo_url, MOON, algorithm="STANDALONE", trace=True)["speculation"]["rounds"]
    token = answer.locator(".token.accepted").first
    index = int(token.get_attribute("data-round") or -1)
    token.click()
    assert tab.page.locator("#round-number").inner_text() == str(index)
    assert tab.page.locator("#round-draft").inner_text() == "STANDALONE"
    marked = answer.locator(".token.in-round").all_inner_texts()
    kinds = _drawn_nodes(tab)
    assert kinds["root"] == 1
    assert kinds["accepted"] >= 1
    assert kinds["accepted"] + kinds["bonus"] == len(marked)
    # Rounds repeat where no tree came too late for its step.
    if [each["text"] for each in rounds[index]["tokens"]] == marked:
        tree = rounds[index]["tree"]
        assert kinds["accepted"] == len(rounds[index]["accepted_nodes"])
        assert kinds["accepted"] + kinds["rejected"] == len(tree["token_ids"])


def test_acceptance_over_time_has_a_mark_where_weights_were_replaced(
    tab: PlaygroundPage, demo_url: str
) -> None:
    tab.choose("STANDALONE")
    tab.ask(MOON)
    tab.page.locator("#acceptance circle.draft").first.wait_for()
    marks = tab.page.locator("#acceptance g.swap")
    num_before = marks.count()
    # The weights that it has already: nothing else of the session changes.
    body = {"model_path": str(ROOT / "shared/demo/target"), "weight_version": "moon-2"}
    request = urllib.request.Request(
        f"{demo_url}update_weights_from_disk",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["success"]
    tab.ask(STORY)  # the page asks again after an answer
    marks.nth(num_before).wait_for()
    assert marks.count() == num_before + 1
    assert "target moon-2" in (marks.last.locator("title").text_content() or "")
    assert tab.page.locator("#acceptance-of").inner_text() == "weights moon-2"


def test_a_node_tells_its_token_and_probability(tab: PlaygroundPage) -> None:
    tab.choose("STANDALONE")
    tab.ask(MOON).locator(".token.accepted").first.click()
    tab.page.locator("#tree .node.accepted").first.hover()
    detail = tab.page.locator("#node-detail").inner_text()
    for fact in ("token ", "draft ", "%", "path ", "position 1", "accepted"):
        assert fact in detail


def test_arrow_keys_walk_the_tree_and_the_timeline(tab: PlaygroundPage) -> None:
    tab.choose("STANDALONE")
    tab.ask(MOON).locator(".token.accepted").first.click()
    page = tab.page
    number = int(page.locator("#round-number").inner_text())
    page.focus("#tree")
    assert "The text so far" in page.locator("#node-detail").inner_text()
    page.keyboard.press("ArrowRight")
    assert "position 1" in page.locator("#node-detail").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "The text so far" in page.locator("#node-detail").inner_text()
    page.focus("#timeline")
    page.keyboard.press("ArrowRight")
    assert page.locator("#round-number").inner_text() == str(number + 1)
    page.click("#round-before")
    assert page.locator("#round-number").inner_text() == str(number)
    # Beside the bar that lies on it.
    page.locator("#timeline .span .hit").last.click(position={"x": 1, "y": 1})
    assert page.locator("#round-live").get_attribute("aria-pressed") == "false"
    page.click("#round-live")
    assert page.locator("#round-after").is_disabled()


def test_speculation_off_gives_the_same_text_plainly(tab: PlaygroundPage) -> None:
    tab.choose("any")
    text = "".join(text for _, text in tab.tokens(tab.ask(MOON)))
    tab.page.click("#new-chat")
    tab.choose("off")
    tokens = tab.tokens(tab.ask(MOON))
    assert "".join(text for _, text in tokens) == text
    assert {source for source, _ in tokens} == {"plain"}
    assert _drawn_nodes(tab) == {"root": 1, "plain": 1}
    assert "no tree" in tab.page.locator("#round-summary").inner_text()
    assert tab.page.locator("#positions").inner_text() == (
        "No tree was verified: speculation was off for this answer."
    )


@pytest.mark.parametrize("rival", ["off", "NGRAM"])
def test_two_sides_by_side_are_identical(tab: PlaygroundPage, rival: str) -> None:
    tab.choose("STANDALONE", rival)
    answers = tab.ask(MOON)
    assert answers.count() == 2
    one, other = answers.nth(0).bounding_box(), answers.nth(1).bounding_box()
    assert one is not None
    assert other is not None
    assert one["x"] + one["width"] < other["x"]
    assert one["y"] == other["y"]
    texts = ["".join(text for _, text in tab.tokens(answers.nth(i))) for i in range(2)]
    assert texts[0] == texts[1] != ""
    verdict = tab.page.locator(".verdict").inner_text()
    assert verdict.startswith("Identical, all ")
    assert " times as fast as " in verdict
    # Either side's rounds can be looked at.
    tab.page.click(f".answer header button >> text={'Plain decoding' if rival == 'off' else rival}")
    assert tab.page.locator("#figures-of").inner_text() != "STANDALONE"


def test_a_second_turn_continues_the_conversation(tab: PlaygroundPage) -> None:
    tab.ask(MOON)
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.ask(STORY)
    messages = sent.value.post_data_json["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    assert messages[2]["content"] == STORY


def test_system_prompt_and_parameters_are_sent(tab: PlaygroundPage) -> None:
    tab.set(system="Be brief.", temperature=0, top_p=0.9, max_tokens=4)
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        answer = tab.ask(MOON)
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    given = {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")}
    assert given == {"temperature": 0, "top_p": 0.9, "max_tokens": 4, "seed": SEED}
    assert len(tab.tokens(answer)) <= 4
    assert answer.locator(".state").inner_text() == "cut at max tokens"


def test_a_refusal_names_field_value_and_limit_and_the_page_goes_on(tab: PlaygroundPage) -> None:
    tab.set(max_tokens=0)
    answer = tab.ask(MOON)
    error = answer.get_by_role("alert").inner_text()
    assert "max_tokens is 0; it must be at least 1" in error
    tab.set(max_tokens=8)
    assert tab.tokens(tab.ask(MOON))


def test_a_gateway_that_is_gone_is_said_so(tab: PlaygroundPage) -> None:
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    error = tab.ask(MOON).get_by_role("alert").inner_text()
    assert "the gateway does not answer" in error


def test_a_stream_that_breaks_keeps_what_it_had(tab: PlaygroundPage) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "The mo"}, "finish_reason": None}]}
    failure = {"error": {"message": "target was lost", "code": "target_lost"}}
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in (chunk, failure))
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    tab.send(MOON)
    answer = tab.page.locator(".answer")
    answer.get_by_role("alert").wait_for()
    assert answer.locator(".text").inner_text() == "The mo"
    assert "target was lost" in answer.get_by_role("alert").inner_text()


def test_the_end_stays_in_sight_unless_the_reader_scrolled_away(open_tab: OpenTab) -> None:
    tab = open_tab(height=520)
    tab.until_served()
    tab.set(seed=SEED)
    tab.ask(STORY)
    tab.ask(STORY)
    is_at_end = """() => {
        const box = document.getElementById("transcript");
        return box.scrollHeight - box.scrollTop - box.clientHeight <= 1;
    }"""
    assert tab.page.evaluate(is_at_end)
    tab.page.click("#parameters-toggle")
    tab.page.wait_for_function(is_at_end)
    tab.page.hover("#transcript")
    tab.page.mouse.wheel(0, -5000)
    tab.page.wait_for_function("() => document.getElementById('transcript').scrollTop === 0")
    tab.page.click("#parameters-toggle")
    # Two frames: the observer would have scrolled by then.
    tab.page.evaluate(
        "() => new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))"
    )
    assert tab.page.evaluate("document.getElementById('transcript').scrollTop") == 0


def test_a_key_is_asked_for_and_kept_in_the_tab(open_tab: OpenTab, locked_url: str) -> None:
    tab = open_tab(locked_url)
    page = tab.page
    page.wait_for_selector("#key-form:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.locator("#key-problem", has_text="not accepted").wait_for()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    tab.until_served()
    assert page.locator("#key-form").is_hidden()
    assert tab.tokens(tab.ask(MOON))
    assert KEY in page.evaluate("Object.values({...sessionStorage})")
    assert KEY not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
    page.reload()
    tab.until_served()


@pytest.mark.parametrize("pane", ["chat", "rounds"])
def test_a_phone_shows_everything_without_scrolling_sideways(open_tab: OpenTab, pane: str) -> None:
    tab = open_tab(width=360, height=740)
    tab.until_served()
    tab.set(seed=SEED)
    tab.choose("STANDALONE", "NGRAM")
    tab.ask(MOON)
    tab.page.click(f".panes [data-pane={pane}]")
    shown, hidden = ("#chat", "#rounds") if pane == "chat" else ("#rounds", "#chat")
    assert tab.page.locator(shown).is_visible()
    assert tab.page.locator(hidden).is_hidden()
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    outside: Any = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, select, textarea, .token, .card")]
            .filter(each => each.checkVisibility())
            .map(each => [each.id || each.className, each.getBoundingClientRect()])
            .filter(([, box]) => box.left < 0 || box.right > 360)
            .map(([name]) => name)"""
    )
    assert outside == []
    if pane == "chat":
        boxes = [box.bounding_box() for box in tab.page.locator(".answer").all()]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]


def test_the_narrowest_phone_keeps_the_bar_in_two_lines(open_tab: OpenTab) -> None:
    tab = open_tab(width=320, height=640)
    tops = tab.page.eval_on_selector_all(
        ".bar > h1, .bar > .panes, .bar > button", "all => all.map((each) => each.offsetTop)"
    )
    assert max(tops) - min(tops) < 16


@pytest.mark.parametrize(("is_phone", "hint"), [(True, "Tap a node."), (False, "arrow keys")])
def test_a_phone_is_not_told_of_keys_that_it_has_not(
    open_tab: OpenTab, is_phone: bool, hint: str
) -> None:
    tab = open_tab(width=360, height=740, is_phone=is_phone)
    tab.until_served()
    tab.ask(MOON)
    tab.page.click(".panes [data-pane=rounds]")
    assert hint in tab.page.locator("#node-detail").inner_text()


def test_the_demo_shows_trees_with_branches_unasked(tab: PlaygroundPage, demo_url: str) -> None:
    rounds = _api(demo_url, MOON, algorithm="STANDALONE", trace=True)["speculation"]["rounds"]
    trees = [each["tree"] for each in rounds if each["tree"] is not None]
    assert any(len(set(tree["parents"])) < len(tree["parents"]) for tree in trees)
    tab.choose("STANDALONE")
    tab.ask(MOON)
    assert _drawn_nodes(tab)["root"] == 1


def test_of_several_drafts_the_strongest_answers_unless_another_is_chosen(
    tab: PlaygroundPage,
) -> None:
    assert tab.page.input_value("#algorithm") == "STANDALONE"
    tab.choose("any")
    assert tab.page.input_value("#algorithm") == "any"


def test_enter_sends_shift_enter_does_not_and_focus_is_seen(tab: PlaygroundPage) -> None:
    page = tab.page
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    assert page.locator(".turn").count() == 0
    names: list[str] = []
    for _ in range(4):
        page.keyboard.press("Tab")
        focused: Any = page.evaluate(
            """() => [document.activeElement.id,
                      getComputedStyle(document.activeElement).outlineStyle]"""
        )
        assert focused[1] != "none", focused
        names.append(focused[0])
    assert names == ["algorithm", "rival", "parameters-toggle", "send"]
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    assert page.locator(".question").inner_text() == "one\ntwo"
    tab.until_done()
    assert "complete" in page.locator("#status").inner_text()


def test_every_control_has_a_name(tab: PlaygroundPage) -> None:
    tab.page.click("#parameters-toggle")
    unnamed: Any = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea")]
            .filter(each => !(each.getAttribute("aria-label") || each.textContent.trim()
                              || each.labels?.[0]?.textContent.trim()))
            .map(each => each.outerHTML)"""
    )
    assert unnamed == []


_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (node) => {
    const colour = rgb(getComputedStyle(node).backgroundColor);
    return colour[3] === 255 || !node.parentElement ? colour : ground(node.parentElement);
  };
  const kinds = "h1, h2, p, label, dt, dd, button, .token, footer, li, kbd, #server, select";
  const texts = [...document.querySelectorAll(kinds)]
    .filter((each) => each.checkVisibility() && each.textContent.trim() && !each.disabled);
  const ratio = (colour, node) => {
    const [one, other] = [light(rgb(colour)), light(ground(node))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  };
  const name = (node) => node.className || node.id || node.tagName;
  const hints = document.querySelectorAll("textarea").values();
  const fields = [...document.querySelectorAll("select, input, textarea")]
    .filter((each) => each.checkVisibility());
  return {
    texts: [
      ...texts.map((each) => [ratio(getComputedStyle(each).color, each), name(each)]),
      ...hints.map((each) => [ratio(getComputedStyle(each, "::placeholder").color, each), each.id]),
    ],
    borders: fields.map((each) => [
      ratio(getComputedStyle(each).borderTopColor, each.parentElement), each.id,
    ]),
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(open_tab: OpenTab, scheme: str) -> None:
    tab = open_tab(scheme=scheme)
    tab.until_served()
    tab.set(seed=SEED)
    tab.choose("STANDALONE")
    tab.ask(MOON)
    tab.page.click("#parameters-toggle")
    ratios: Any = tab.page.evaluate(_CONTRAST)
    assert len(ratios["texts"]) > 30
    assert len(ratios["borders"]) == 8
    # WCAG 2.2, 1.4.3: 4.5 for text of this size; 1.4.11: 3 for what shows where a field is.
    assert [each for each in ratios["texts"] if each[0] < 4.5] == []
    assert [each for each in ratios["borders"] if each[0] < 3] == []


def test_the_theme_follows_the_system_until_it_is_chosen(open_tab: OpenTab) -> None:
    tab = open_tab(scheme="dark")

    def ground() -> Any:
        return tab.page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = ground()
    tab.page.emulate_media(color_scheme="light")
    light = ground()
    assert light != dark
    tab.page.click("#theme")
    assert ground() == dark
    assert "dark" in (tab.page.get_attribute("#theme", "aria-label") or "")
    tab.page.reload()
    assert ground() == dark
    tab.page.click("#theme")
    assert ground() == light
