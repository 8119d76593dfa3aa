"""The page's arithmetic, module by module, on rounds made up for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import OpenTab

pytestmark = pytest.mark.browser

ROUNDS = [
    {
        "round": 0,
        "algorithm": "FAKE",
        "rows": 9,
        "wait_ms": 0,
        "verify_ms": 100,
        "draft_ms": None,
        "tree": None,
        "accepted_nodes": [],
        "tokens": [{"id": 5, "text": "a", "source": "plain"}],
    },
    {
        "round": 1,
        "algorithm": "FAKE",
        "rows": 7,
        "wait_ms": 6,
        "verify_ms": 4,
        "draft_ms": 5,
        "tree": {
            "token_ids": [1, 2, 3, 4, 5, 6],
            "texts": [" b", " c", "d", "e", "f", "\n"],
            "parents": [None, None, 1, 1, 0, 2],
            "log_probs": [-0.2, -1.7, -0.1, -3.0, 0.0, -0.5],
        },
        "accepted_nodes": [1, 3],
        "tokens": [
            {"id": 2, "text": " c", "source": "accepted"},
            {"id": 4, "text": "e", "source": "accepted"},
            {"id": 9, "text": "!", "source": "bonus"},
        ],
    },
    {
        "round": 2,
        "algorithm": "FAKE",
        "rows": 2,
        "wait_ms": 6,
        "verify_ms": 4,
        "draft_ms": 0,
        "tree": {"token_ids": [7], "texts": ["g"], "parents": [None], "log_probs": []},
        "accepted_nodes": [],
        "tokens": [{"id": 8, "text": "h", "source": "bonus"}],
    },
]
FENCED = ["So:\n", "``", "`py\nx =", " `", "```1\n", "  ```", "\n", "on", " ```", "\n"]


def test_code_is_what_stands_between_fences_at_the_start_of_a_line(open_tab: OpenTab) -> None:
    found = open_tab().page.evaluate(
        """async (texts) => {
            const { Fences } = await import("./playground/fences.js");
            const fences = new Fences();
            return texts.map((each) => fences.holds(each));
        }""",
        FENCED,
    )
    assert found == [False, False, True, True, True, True, False, False, False, False]


def _call(open_tab: OpenTab, module: str, function: str, *arguments: object) -> Any:
    return open_tab().page.evaluate(
        """async ([module, name, given]) => {
            const found = (await import(`/playground/${module}.js`))[name](...given);
            return JSON.parse(JSON.stringify(found, (key, value) =>
                key === "parent" ? undefined : value));
        }""",
        [module, function, list(arguments)],
    )


def test_figures_are_those_of_the_rounds(open_tab: OpenTab) -> None:
    assert _call(open_tab, "figures", "figuresOf", ROUNDS) == {
        "numRounds": 3,
        "numTokens": 5,
        # Four tokens after the first round, in twice ten milliseconds.
        "tokensPerSecond": 200,
        "tokensPerRound": 2,
        "hitRate": 1,
        "positions": [
            {"reached": 2, "accepted": 1},
            {"reached": 1, "accepted": 1},
            {"reached": 1, "accepted": 0},
        ],
    }


def test_figures_without_rounds_are_unknown_not_nothing(open_tab: OpenTab) -> None:
    figures = _call(open_tab, "figures", "figuresOf", [])
    assert figures["tokensPerSecond"] is figures["tokensPerRound"] is figures["hitRate"] is None


def test_tree_nodes_do_not_overlap_and_the_accepted_path_is_straight(open_tab: OpenTab) -> None:
    layout = _call(open_tab, "tree_layout", "layoutOf", ROUNDS[1], "a")
    nodes = layout["nodes"]
    assert len(nodes) == 1 + 6 + 1
    for place, one in enumerate(nodes):
        assert one["x"] >= 0
        assert one["x"] + one["width"] <= layout["width"]
        assert one["y"] + 24 <= layout["height"]
        for other in nodes[place + 1 :]:
            is_beside = (
                one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            )
            assert is_beside or abs(one["y"] - other["y"]) >= 24
    path = [each for each in nodes if each["kind"] in ("root", "accepted", "bonus")]
    assert [each["text"] for each in path] == ["a", " c", "e", "!"]
    assert len({each["y"] for each in path}) == 1


@pytest.mark.parametrize(("is_last", "label"), [(True, "end"), (False, "#2")])
def test_the_token_that_ends_an_answer_is_called_end(
    open_tab: OpenTab, is_last: bool, label: str
) -> None:
    drawn = {**ROUNDS[2], "tokens": [{"id": 2, "text": "", "source": "bonus"}]}
    [bonus] = _last_nodes(_call(open_tab, "tree_layout", "layoutOf", drawn, "a", is_last))
    assert bonus["label"] == label
    accepted = {
        **ROUNDS[2],
        "tree": {"token_ids": [2], "texts": [""], "parents": [None], "log_probs": []},
        "accepted_nodes": [0],
        "tokens": [{"id": 2, "text": "", "source": "accepted"}],
    }
    [node] = _last_nodes(_call(open_tab, "tree_layout", "layoutOf", accepted, "a", is_last))
    assert node["label"] == label


def _last_nodes(layout: Any) -> list[Any]:
    return [each for each in layout["nodes"] if each["kind"] in ("accepted", "bonus")][-1:]


def test_timeline_has_a_bar_for_each_answer_and_a_dot_for_what_was_pushed_ahead(
    open_tab: OpenTab,
) -> None:
    drawn: Any = open_tab().page.evaluate(
        """async (rounds) => {
            const { Timeline } = await import("/playground/timeline.js");
            const box = document.createElement("div");
            new Timeline(box, () => {}, () => {}).draw(rounds, 1);
            const xs = (kind) => [...box.querySelectorAll(`rect.${kind}`)]
                .map((each) => ["x", "width"].map((name) => Number(each.getAttribute(name))));
            return {
                verify: xs("verify"), draft: xs("draft"),
                pushed: box.querySelectorAll("circle.draft").length,
                current: [...box.querySelectorAll(".span")]
                    .findIndex((each) => each.classList.contains("current")),
            };
        }""",
        ROUNDS,
    )
    # 120 ms on 440 units: 100 to verify, then twice 6 to wait and 4 to verify.
    assert [x for x, _ in drawn["verify"]] == pytest.approx([0, 106 * 440 / 120, 116 * 440 / 120])
    assert [x for x, _ in drawn["draft"]] == pytest.approx([100 * 440 / 120])
    assert [width for _, width in drawn["draft"]] == pytest.approx([5 * 440 / 120 - 0.75])
    assert (drawn["pushed"], drawn["current"]) == (1, 1)


def test_labels_show_blanks_and_stay_short(open_tab: OpenTab) -> None:
    assert _call(open_tab, "tree_layout", "labelOf", " a b\n\t") == "·a·b↵⇥"
    assert len(_call(open_tab, "tree_layout", "labelOf", "internationalisation")) == 12


def test_a_comparison_that_differs_says_where(open_tab: OpenTab) -> None:
    sides = [
        {"tokenIds": [1, 2, 3], "rounds": ROUNDS, "name": "one", "label": "One"},
        {"tokenIds": [1, 2, 4], "rounds": ROUNDS, "name": "other", "label": "Other"},
    ]
    found = _call(open_tab, "turn_view", "compare", sides)
    assert found == {"isSame": False, "words": "The answers differ from token 3 on.", "rest": ""}
    sides[1]["tokenIds"] = [1, 2]
    assert _call(open_tab, "turn_view", "compare", sides)["isSame"] is False
    sides[1]["tokenIds"] = [1, 2, 3]
    same = _call(open_tab, "turn_view", "compare", sides)
    assert same["isSame"] is True
    assert same["rest"] == " One is 1.00 times as fast as other."


def test_events_cut_anywhere_are_put_together(open_tab: OpenTab) -> None:
    text = 'data: {"a":"ü→"}\n\ndata: {"b":2}\n\ndata: [DONE]\n\ndata: {"c":3}\n\n'
    read: Any = open_tab().page.evaluate(
        """async ([text, size]) => {
            const { readEvents } = await import("/playground/event_reader.js");
            const bytes = new TextEncoder().encode(text);
            const body = new ReadableStream({
                start(controller) {
                    for (let at = 0; at < bytes.length; at += size) {
                        controller.enqueue(bytes.slice(at, at + size));
                    }
                    controller.close();
                },
            });
            const events = [];
            for await (const event of readEvents(body)) events.push(event);
            return events;
        }""",
        [text, 3],
    )
    assert read == ['{"a":"ü→"}', '{"b":2}']


@pytest.mark.parametrize(
    ("is_off", "model", "reason"),
    [
        (True, {"algorithms": ["NGRAM"], "detail": ""}, "speculation was off for this answer"),
        (False, {"algorithms": [], "detail": ""}, "no draft is attached"),
        (False, {"algorithms": ["NGRAM"], "detail": "plain is faster"}, "plain is faster"),
        (False, {"algorithms": ["NGRAM"], "detail": ""}, "none arrived in time"),
    ],
)
def test_an_answer_without_trees_says_why(
    open_tab: OpenTab, is_off: bool, model: dict[str, object], reason: str
) -> None:
    found = _call(open_tab, "round_panel", "noTree", is_off, model)
    assert found == f"No tree was verified: {reason}."


HISTORY = {
    "model": "demo",
    "weight_versions": ["default"],
    "interval_s": 10,
    "intervals": [
        {"begin_time": 1000, "verified_round_count": 0, "accepted_token_count": 0},
        {"begin_time": 1010, "verified_round_count": 4, "accepted_token_count": 6},
        {"begin_time": 1020, "verified_round_count": 0, "accepted_token_count": 0},
        {"begin_time": 1030, "verified_round_count": 2, "accepted_token_count": 4},
    ],
    "weight_changes": [
        {"time": 990.0, "algorithm": "EAGLE3", "weight_version": "1"},
        {"time": 1024.5, "algorithm": "EAGLE3", "weight_version": "2"},
        {"time": 1026.0, "algorithm": None, "weight_version": "default"},
    ],
}


def test_the_course_of_acceptance_has_a_point_where_rounds_were_and_a_mark_at_each_swap(
    open_tab: OpenTab,
) -> None:
    assert _call(open_tab, "acceptance", "courseOf", HISTORY) == {
        "begin": 1010,
        "end": 1040,
        "points": [{"time": 1015, "length": 2.5}, {"time": 1035, "length": 3}],
        "marks": [
            {"time": 1024.5, "label": "EAGLE3 2"},
            {"time": 1026.0, "label": "target default"},
        ],
    }


def test_the_versions_are_the_targets_and_the_last_that_each_draft_took(open_tab: OpenTab) -> None:
    found = _call(open_tab, "acceptance", "versionsOf", HISTORY)
    assert found == "weights default · EAGLE3 2"


def test_marks_too_close_to_each_other_are_not_both_named(open_tab: OpenTab) -> None:
    drawn: Any = open_tab().page.evaluate(
        """async (history) => {
            const { AcceptanceView } = await import("/playground/acceptance_view.js");
            const box = document.createElement("div");
            new AcceptanceView(null, box, document.createElement("span")).draw(history);
            return {
                marks: box.querySelectorAll("line.swap").length,
                named: [...box.querySelectorAll("g.swap text")].map((each) => each.textContent),
                points: box.querySelector("polyline").getAttribute("points").split(" ").length,
                spoken: box.querySelector("svg").getAttribute("aria-label"),
            };
        }""",
        HISTORY,
    )
    assert drawn == {
        "marks": 2,
        "named": ["target default"],
        "points": 2,
        "spoken": "3.00 tokens a round; weights were replaced 2 times",
    }
