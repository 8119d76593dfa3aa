/** The pane beside the chat: figures, tree and timeline of one answer. */

import { element, part } from "./element.js";
import { figuresOf, shown } from "./figures.js";
import { Timeline } from "./timeline.js";
import { TreeView } from "./tree_view.js";

export class RoundPanel {
  #tree = new TreeView(part("tree"), part("node-detail"));
  #timeline;
  #onRound;
  /** @type {import("./answer.js").Answer | null} */
  #answer = null;
  /** Index of the shown round; null follows the newest. */
  #chosen = null;
  #drawn = null;
  /** @type {import("./client.js").Model | null} that answers */
  #model = null;

  /** @param {(round: number | null) => void} onRound the round chosen by hand; null when live */
  constructor(onRound) {
    this.#onRound = onRound;
    this.#timeline = new Timeline(
      part("timeline"),
      (round) => this.choose(round),
      (step) => this.#step(step),
    );
    part("round-before").addEventListener("click", () => this.#step(-1));
    part("round-after").addEventListener("click", () => this.#step(1));
    part("round-live").addEventListener("click", () => this.choose(null));
    this.update();
  }

  /** @param {import("./answer.js").Answer | null} answer */
  show(answer) {
    if (answer === this.#answer) return;
    this.#answer = answer;
    this.#drawn = null;
    this.#tree.resetHeight();
    this.choose(null);
  }

  /** @param {import("./client.js").Model} model as the server describes it now */
  serve(model) {
    this.#model = model;
    this.#drawn = null;
    this.update();
  }

  /** @param {number | null} round index; null follows the newest */
  choose(round) {
    this.#chosen = round;
    this.#onRound(round);
    this.update();
  }

  /** Draws the current round, if something has changed. */
  update() {
    const rounds = this.#answer?.rounds ?? [];
    const current = this.#chosen ?? rounds.length - 1;
    const round = rounds[current] ?? null;
    const drawn = `${rounds.length} ${current}`;
    part("round-live").setAttribute("aria-pressed", String(this.#chosen === null));
    part("round-before").disabled = current <= 0;
    part("round-after").disabled = current >= rounds.length - 1;
    part("figures-of").textContent = this.#answer === null ? "" : this.#answer.label;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.#drawFigures(figuresOf(rounds));
    part("round-number").textContent = round === null ? "" : round.round;
    part("round-draft").textContent = round?.algorithm ?? "";
    part("round-summary").textContent = round === null ? "" : summaryOf(round);
    const isLast = current === rounds.length - 1 && this.#answer?.finishReason === "stop";
    this.#tree.draw(round, rounds[current - 1]?.tokens.at(-1)?.text ?? "prompt", isLast);
    this.#timeline.draw(rounds, current);
  }

  #step(step) {
    const last = (this.#answer?.rounds.length ?? 0) - 1;
    if (last < 0) return;
    const current = this.#chosen ?? last;
    this.choose(Math.min(Math.max(current + step, 0), last));
  }

  #drawFigures(figures) {
    const hits = figures.hitRate === null ? "–" : `${Math.round(100 * figures.hitRate)}%`;
    const rows = [
      ["tokens/s", shown(figures.tokensPerSecond, 1), "by the target's clock, after the first round"],
      ["tokens a round", shown(figures.tokensPerRound, 2), "of rounds with a tree, bonus included"],
      ["rounds with a tree", hits, "of the rounds after the first"],
      ["rounds", String(figures.numRounds), "decode steps of the target"],
    ];
    part("figures").replaceChildren(
      ...rows.map(([name, value, title]) =>
        element("div", { title }, element("dt", {}, name), element("dd", {}, value)),
      ),
    );
    const isOff = this.#answer?.speculation.disable === true;
    const places = positionRows(figures.positions);
    const hint = figures.numRounds === 0 ? "" : noTree(isOff, this.#model);
    part("positions").replaceChildren(...(places.length > 0 ? places : [element("p", { class: "hint" }, hint)]));
  }
}

/**
 * @param {boolean} isOff the request asked for plain decoding
 * @param {import("./client.js").Model | null} model
 * @returns {string} why an answer has no tree
 */
export function noTree(isOff, model) {
  if (isOff) return "No tree was verified: speculation was off for this answer.";
  if (model !== null && model.algorithms.length === 0) return "No tree was verified: no draft is attached.";
  if (model !== null && model.detail !== "") return `No tree was verified: ${model.detail}.`;
  return "No tree was verified: none arrived in time.";
}

/** @param {import("./figures.js").Round} round */
function summaryOf(round) {
  const candidates = round.tree?.token_ids.length ?? 0;
  const tree = round.tree === null ? "no tree" : `${round.accepted_nodes.length} of ${candidates} accepted`;
  const drafted = round.draft_ms === 0 ? "drafted ahead, " : `draft ${digits(round.draft_ms ?? 0)}, `;
  const draft = round.draft_ms === null ? "" : drafted;
  const rows = round.rows === 1 ? "1 row" : `${round.rows} rows`;
  return `${tree} · ${rows} · ${draft}wait ${digits(round.wait_ms)}, verify ${digits(round.verify_ms)} ms`;
}

/** @param {number} value */
function digits(value) {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

/** @param {{reached: number, accepted: number}[]} positions */
function positionRows(positions) {
  return positions.map(({ reached, accepted }, place) => {
    const share = accepted / reached;
    const fill = element("i");
    fill.style.width = `${100 * share}%`;
    return element(
      "div",
      { class: "position" },
      element("span", {}, String(place + 1)),
      element("span", { class: "track" }, fill),
      element("span", {}, `${Math.round(100 * share)}%  ${accepted} of ${reached}`),
    );
  });
}
