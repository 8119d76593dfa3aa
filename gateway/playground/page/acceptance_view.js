/** Acceptance over time, with a mark where weights of the target or of a draft were replaced. */

import { courseOf, versionsOf } from "./acceptance.js";
import { element, shape } from "./element.js";

const WIDTH = 440;
const TOP = 14;
const AXIS = 92;
const HEIGHT = AXIS + 16;
const LEFT = 22;
const LABEL_WIDTH = 80;

export class AcceptanceView {
  #client;
  #box;
  #versions;
  #shown = "";

  /**
   * @param {import("./client.js").Client} client
   * @param {HTMLElement} box
   * @param {HTMLElement} versions
   */
  constructor(client, box, versions) {
    this.#client = client;
    this.#box = box;
    this.#versions = versions;
  }

  /**
   * Asks for the history once and draws it. Without an answer the drawing stays.
   *
   * @param {string} model
   */
  async show(model) {
    try {
      const history = await this.#client.history(model);
      const text = JSON.stringify(history);
      if (text === this.#shown) return;
      this.#shown = text;
      this.draw(history);
    } catch {
      // The status line shows that the gateway does not answer.
    }
  }

  /** @param {import("./acceptance.js").History} history */
  draw(history) {
    this.#versions.textContent = versionsOf(history);
    const course = courseOf(history);
    if (course.points.length === 0 && course.marks.length === 0) {
      this.#box.replaceChildren(element("p", { class: "hint" }, "No tree was verified yet."));
      return;
    }
    const most = Math.ceil(Math.max(2, ...course.points.map(({ length }) => length)));
    const scale = (WIDTH - LEFT) / Math.max(course.end - course.begin, 1);
    const x = (time) => LEFT + (time - course.begin) * scale;
    const y = (length) => AXIS - ((length - 1) / (most - 1)) * (AXIS - TOP);
    this.#box.replaceChildren(
      shape(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": spoken(course) },
        ...frame(course, most, y),
        ...course.marks.flatMap((mark, place) => markOf(mark, x, course.marks[place + 1])),
        shape("polyline", {
          class: "course",
          points: course.points.map(({ time, length }) => `${x(time)},${y(length)}`).join(" "),
        }),
        ...course.points.map(({ time, length }) =>
          shape(
            "circle",
            { class: "draft", cx: x(time), cy: y(length), r: 2.5 },
            shape("title", {}, `${length.toFixed(2)} tokens a round, ${clock(time)}`),
          ),
        ),
      ),
    );
  }
}

function frame(course, most, y) {
  const label = (at, height, text, anchor) =>
    shape("text", { class: "small", x: at, y: height, "text-anchor": anchor }, text);
  return [
    shape("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: AXIS, y2: AXIS }),
    shape("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: TOP, y2: TOP }),
    label(LEFT - 5, y(1) + 4, "1", "end"),
    label(LEFT - 5, y(most) + 4, String(most), "end"),
    label(LEFT, HEIGHT - 2, clock(course.begin), "start"),
    label(WIDTH, HEIGHT - 2, clock(course.end), "end"),
  ];
}

/** Draws a mark as a line, with its name beside it if the next mark leaves room. */
function markOf(mark, x, next) {
  const at = x(mark.time);
  const isNamed = next === undefined || x(next.time) - at >= LABEL_WIDTH;
  const isLate = at > WIDTH - LABEL_WIDTH;
  return [
    shape(
      "g",
      { class: "swap" },
      shape("title", {}, `${mark.label}, ${clock(mark.time)}`),
      shape("line", { class: "swap", x1: at, x2: at, y1: TOP - 8, y2: AXIS }),
      ...(isNamed
        ? [shape("text", { class: "small", x: isLate ? at - 3 : at + 3, y: TOP - 3, "text-anchor": isLate ? "end" : "start" }, mark.label)]
        : []),
    ),
  ];
}

function spoken({ points, marks }) {
  const last = points.at(-1);
  const length = last === undefined ? "no tree was verified" : `${last.length.toFixed(2)} tokens a round`;
  return `${length}; weights were replaced ${marks.length === 1 ? "once" : `${marks.length} times`}`;
}

/** @param {number} time seconds since the epoch */
function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
