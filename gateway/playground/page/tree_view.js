/** Draws the candidate tree of a round; pointer and arrow keys select nodes. */

import { element, shape } from "./element.js";
import { layoutOf, NODE_HEIGHT, percent } from "./tree_layout.js";

const KINDS = {
  root: "the text so far",
  accepted: "accepted",
  rejected: "not taken",
  bonus: "bonus: drawn by the target",
  plain: "plain: drawn without a tree",
};
const KEPT_HEIGHT = 176;
const SMALLEST_SCALE = 0.8;
const HINT = matchMedia("(pointer: coarse)").matches
  ? "Tap a node."
  : "Point at a node, or focus the tree and use the arrow keys.";
const STEPS = { ArrowRight: "in", ArrowLeft: "out", ArrowDown: "next", ArrowUp: "before" };

export class TreeView {
  #box;
  #detail;
  #nodes = [];
  #current = 0;
  #height = 0;
  #size = { width: 0, height: 0 };

  /**
   * @param {HTMLElement} box focusable; scrolls
   * @param {HTMLElement} detail describes the current node
   */
  constructor(box, detail) {
    this.#box = box;
    this.#detail = detail;
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("focus", () => this.#choose(this.#current));
    box.addEventListener("blur", () => this.#leave());
    box.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(() => this.#fit()).observe(box);
    this.draw(null);
  }

  /** Resets the height of the box, for another answer. */
  resetHeight() {
    this.#height = 0;
  }

  /**
   * @param {import("./figures.js").Round | null} round
   * @param {string} [before] the last token before the round
   * @param {boolean} [isLast] whether it is the last round of an answer that the model ended
   */
  draw(round, before = "", isLast = false) {
    this.#current = 0;
    if (round === null) {
      this.#nodes = [];
      this.#box.replaceChildren(
        element("p", { class: "hint" }, "Candidates of the newest round appear here."),
      );
      this.#detail.textContent = "";
      return;
    }
    const { nodes, width, height } = layoutOf(round, before, isLast);
    // The box only grows, up to a limit, so that a live tree does not make the page jump.
    this.#height = Math.min(Math.max(this.#height, height), KEPT_HEIGHT);
    this.#size = { width, height: Math.max(height, this.#height) };
    const edges = nodes.filter((node) => node.parent !== null).map(edgeOf);
    const drawn = nodes.map((node, place) => this.#nodeOf(node, place));
    this.#nodes = nodes;
    this.#box.replaceChildren(
      shape("svg", { role: "img", "aria-label": summaryOf(nodes) }, ...edges, ...drawn),
    );
    this.#fit();
    if (document.activeElement === this.#box) this.#choose(0);
    else this.#leave();
  }

  /** Scales a drawing down that is a little too wide; a much wider one scrolls. */
  #fit() {
    const drawing = this.#box.querySelector("svg");
    if (drawing === null) return;
    const { width, height } = this.#size;
    const scale = Math.min(Math.max((this.#box.clientWidth || width) / width, SMALLEST_SCALE), 1);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("width", String(width * scale));
    drawing.setAttribute("height", String(height * scale));
  }

  #nodeOf(node, place) {
    const label = shape("text", { x: node.x + 8, y: node.y + 16 }, node.label);
    const parts = [
      shape("rect", { x: node.x, y: node.y, width: node.width, height: NODE_HEIGHT, rx: 6 }),
      label,
    ];
    if (node.prob !== null) {
      const at = { class: "prob", x: node.x + node.width - 7, y: node.y + 16, "text-anchor": "end" };
      parts.push(shape("text", at, percent(node.prob)));
    }
    return shape(
      "g",
      {
        class: `node ${node.kind}`,
        pointerenter: () => this.#choose(place),
        click: () => this.#choose(place),
      },
      ...parts,
    );
  }

  #key(event) {
    const step = STEPS[event.key];
    if (step === undefined || this.#nodes.length === 0) return;
    event.preventDefault();
    const current = this.#nodes[this.#current];
    const siblings = current.parent?.children ?? [current];
    const at = siblings.indexOf(current);
    const next = {
      in: current.children[0],
      out: current.parent,
      next: siblings[at + 1],
      before: siblings[at - 1],
    }[step];
    if (next) this.#choose(this.#nodes.indexOf(next), true);
  }

  #choose(place, shouldScroll = false) {
    if (this.#nodes.length === 0) return;
    this.#unmark();
    this.#current = place;
    const drawn = this.#box.querySelectorAll(".node")[place];
    drawn.classList.add("current");
    if (shouldScroll) drawn.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.#detail.replaceChildren(...detailOf(this.#nodes[place]));
  }

  #leave() {
    if (document.activeElement === this.#box) return;
    this.#unmark();
    this.#detail.textContent = this.#nodes.length > 0 ? HINT : "";
  }

  #unmark() {
    this.#box.querySelector(".node.current")?.classList.remove("current");
  }
}

/** @param {import("./tree_layout.js").Node} node */
function edgeOf(node) {
  const { parent } = node;
  const [x1, y1] = [parent.x + parent.width, parent.y + NODE_HEIGHT / 2];
  const [x2, y2] = [node.x, node.y + NODE_HEIGHT / 2];
  const bend = Math.max(12, (x2 - x1) / 2);
  const d = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  return shape("path", { class: `edge ${node.kind}`, d });
}

/** @param {import("./tree_layout.js").Node} node */
function detailOf(node) {
  if (node.kind === "root") return ["The text so far; candidates continue it."];
  const facts = [`token ${node.id}`];
  if (node.prob !== null) {
    facts.push(`draft ${percent(node.prob)}`, `path ${percent(node.pathProb)}`);
  }
  facts.push(`position ${node.depth}`, KINDS[node.kind]);
  return [element("b", {}, node.text === "" ? node.label : JSON.stringify(node.text)), ` ${facts.join(" · ")}`];
}

/** @param {import("./tree_layout.js").Node[]} nodes */
function summaryOf(nodes) {
  const accepted = nodes.filter((node) => node.kind === "accepted");
  const candidates = nodes.filter((node) => node.index !== null);
  return `${candidates.length} candidates, ${accepted.length} accepted: ${accepted.map((node) => node.text).join("")}`;
}
