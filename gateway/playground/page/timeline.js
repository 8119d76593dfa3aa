/** Draws rounds over time: waiting, verification by the target, and drafting. */

import { element, shape } from "./element.js";

const NUM_SHOWN = 14;
const WIDTH = 440;
const LANE = 16;
const TOP = 16;
const TARGET = TOP;
const DRAFT = TOP + LANE + 6;
const AXIS = DRAFT + LANE + 6;
const HEIGHT = AXIS + 18;
const LABEL_WIDTH = 20;
const TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];

export class Timeline {
  #box;
  #onSelect;

  /**
   * @param {HTMLElement} box focusable
   * @param {(round: number) => void} onSelect index of a round
   * @param {(step: number) => void} onStep -1 or 1
   */
  constructor(box, onSelect, onStep) {
    this.#box = box;
    this.#onSelect = onSelect;
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      onStep(step);
    });
    this.draw([], 0);
  }

  /**
   * @param {import("./figures.js").Round[]} rounds
   * @param {number} current index of the current round, which is always in view
   */
  draw(rounds, current) {
    if (rounds.length === 0) {
      this.#box.replaceChildren(element("p", { class: "hint" }, "No rounds yet."));
      return;
    }
    const spans = spansOf(rounds, windowOf(rounds.length, current));
    const begin = spans[0].begin;
    const scale = WIDTH / Math.max(spans.at(-1).end - begin, 1e-6);
    const at = (ms) => (ms - begin) * scale;
    const labels = labelsOf(spans, at);
    this.#box.replaceChildren(
      shape(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summaryOf(rounds, current) },
        ...spans.map((span, place) => this.#spanOf(span, at, labels[place], span.index === current)),
        ...axisOf(begin, spans.at(-1).end, at),
      ),
    );
  }

  #spanOf(span, at, label, isCurrent) {
    const { round, begin, plan, end } = span;
    const bar = (kind, from, to, y, height) =>
      shape("rect", { class: kind, x: at(from), y, width: Math.max(at(to) - at(from) - 0.75, 0.75), height, rx: 1.5 });
    const parts = [
      shape("rect", { class: "hit", x: at(begin), y: 0, width: at(end) - at(begin), height: AXIS }),
      bar("wait", begin, plan, TARGET + LANE / 2 - 2, 4),
      bar("verify", plan, end, TARGET, LANE),
    ];
    if (round.draft_ms === 0) {
      // Drafted ahead: the tree had arrived before the verdict.
      parts.push(shape("circle", { class: "draft", cx: at(begin) + 3, cy: DRAFT + LANE / 2, r: 3 }));
    } else if (round.draft_ms !== null) {
      parts.push(bar("draft", begin, begin + Math.min(round.draft_ms, end - begin), DRAFT, LANE));
    }
    if (label !== null) {
      parts.push(shape("text", { class: "small", x: label, y: TOP - 5, "text-anchor": "middle" }, `+${round.tokens.length}`));
    }
    return shape(
      "g",
      { class: isCurrent ? "span current" : "span", click: () => this.#onSelect(span.index) },
      shape("title", {}, `round ${round.round}: wait ${round.wait_ms} ms, verify ${round.verify_ms} ms`),
      ...parts,
    );
  }
}

/**
 * @param {number} numRounds
 * @param {number} current
 * @returns {[number, number]} half-open
 */
function windowOf(numRounds, current) {
  const end = Math.min(numRounds, Math.max(current + 3, NUM_SHOWN));
  return [Math.max(0, end - NUM_SHOWN), end];
}

/** Times in ms since the request left the queue: begin (verdict before), plan, end (verdict). */
function spansOf(rounds, [first, last]) {
  const spans = [];
  let now = 0;
  for (const [index, round] of rounds.entries()) {
    const plan = now + round.wait_ms;
    const end = plan + round.verify_ms;
    if (index >= first && index < last) spans.push({ index, round, begin: now, plan, end });
    now = end;
  }
  return spans;
}

/** Returns the x of the token count above each bar; null if it would touch the previous one. */
function labelsOf(spans, at) {
  let last = -Infinity;
  return spans.map(({ plan, end }) => {
    const middle = Math.min(Math.max((at(plan) + at(end)) / 2, 9), WIDTH - 9);
    if (middle - last < LABEL_WIDTH) return null;
    last = middle;
    return middle;
  });
}

function axisOf(begin, end, at) {
  const tick = TICKS.find((ms) => (end - begin) / ms <= 6) ?? TICKS.at(-1);
  const marks = [shape("line", { class: "axis", x1: 0, x2: WIDTH, y1: AXIS, y2: AXIS })];
  for (let ms = Math.ceil(begin / tick) * tick; ms <= end; ms += tick) {
    const x = at(ms);
    marks.push(shape("line", { class: "axis", x1: x, x2: x, y1: AXIS, y2: AXIS + 4 }));
    if (x > 14 && x < WIDTH - 24) {
      marks.push(shape("text", { class: "small", x, y: AXIS + 15, "text-anchor": "middle" }, `${ms} ms`));
    }
  }
  return marks;
}

function summaryOf(rounds, current) {
  const round = rounds[current];
  return `round ${round.round} of ${rounds.length}: wait ${round.wait_ms} ms, verify ${round.verify_ms} ms`;
}
