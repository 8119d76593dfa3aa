/** Shows an answer as text, with every token marked by its source. */

import { element } from "./element.js";
import { Fences } from "./fences.js";
import { figuresOf, shown } from "./figures.js";

const WORDS = {
  accepted: "draft token, accepted",
  bonus: "the target's own, after a tree",
  plain: "drawn without a tree",
};

export class AnswerView {
  #answer;
  #onSelect;
  #text = element("div", { class: "text" });
  #caret = element("span", { class: "caret", "aria-hidden": "true" });
  #footer = element("footer");
  #problem = element("div");
  #numShown = 0;
  #fences = new Fences();

  /**
   * @param {import("./answer.js").Answer} answer
   * @param {(round: number | null) => void} onSelect a token's round; null for the newest
   */
  constructor(answer, onSelect) {
    this.#answer = answer;
    this.#onSelect = onSelect;
    const label = element("button", { type: "button", click: () => onSelect(null) }, answer.label);
    this.root = element(
      "article",
      { class: "answer", "aria-busy": "true", "aria-label": `Answer, ${answer.name}` },
      element("header", {}, label),
      this.#text,
      this.#problem,
      this.#footer,
    );
    this.#text.append(this.#caret);
    this.#text.addEventListener("click", (event) => this.#click(event));
    this.update();
  }

  /** Draws the new rounds and the state of the answer. */
  update() {
    const { rounds, isOpen, tail } = this.#answer;
    for (; this.#numShown < rounds.length; this.#numShown += 1) {
      this.#caret.before(...this.#tokensOf(rounds[this.#numShown], this.#numShown));
    }
    if (!isOpen && this.#caret.isConnected) this.#caret.replaceWith(tail);
    this.root.setAttribute("aria-busy", String(isOpen));
    this.#footer.replaceChildren(...footerOf(this.#answer));
    this.#showError();
  }

  /** @param {boolean} isSelected whether the rounds shown beside are this answer's */
  set selected(isSelected) {
    this.root.toggleAttribute("data-selected", isSelected);
  }

  /** @param {number | null} round whose tokens are marked */
  mark(round) {
    for (const token of this.#text.querySelectorAll(".in-round")) token.classList.remove("in-round");
    if (round === null) return;
    for (const token of this.#text.querySelectorAll(`[data-round="${round}"]`)) {
      token.classList.add("in-round");
    }
  }

  /**
   * @param {import("./figures.js").Round} round
   * @param {number} index
   */
  #tokensOf(round, index) {
    return round.tokens
      .filter((token) => token.text !== "")
      .map((token) => {
        const code = this.#fences.holds(token.text) ? " code" : "";
        const title = `${WORDS[token.source]} · round ${round.round} · id ${token.id}`;
        const attributes = { class: `token ${token.source}${code}`, "data-round": index, title };
        return element("span", attributes, token.text);
      });
  }

  #click(event) {
    const token = event.target.closest("[data-round]");
    if (token !== null && getSelection()?.isCollapsed !== false) {
      this.#onSelect(Number(token.dataset.round));
    }
  }

  #showError() {
    const { error } = this.#answer;
    if (error === null || this.#problem.childElementCount > 0) return;
    const code = error.code ? element("code", {}, ` ${error.code}`) : "";
    this.#problem.append(
      element("p", { class: "problem-box", role: "alert" }, error.message, code),
    );
  }
}

/**
 * @param {import("./answer.js").Answer} answer
 * @returns {string[]} empty for an ordinary state
 */
function stateOf(answer) {
  if (answer.state === "waiting") return ["waiting"];
  if (answer.state === "stopped") return ["stopped"];
  return answer.finishReason === "length" ? ["cut at max tokens"] : [];
}

/** @param {import("./answer.js").Answer} answer */
function footerOf(answer) {
  const figures = figuresOf(answer.rounds);
  const state = stateOf(answer).map((words) => element("span", { class: "state" }, words));
  if (figures.numTokens === 0) return state;
  const speed = element("span", { class: "figure" }, `${shown(figures.tokensPerSecond, 1)} tokens/s`);
  const perRound = figures.tokensPerRound === null ? "" : ` · ${shown(figures.tokensPerRound, 2)} a round`;
  const name = element("span", { class: "name" }, ` · ${answer.name}`);
  const model = answer.model === null ? "" : ` · ${answer.model}`;
  const facts = [model, ` · ${figures.numTokens} tokens${perRound}`, name, ` · seed\u00a0${answer.seed}`];
  return [speed, ...facts, ...state.flatMap((words) => [" · ", words])];
}
