/** One question with its answer, or its two answers side by side. */

import { AnswerView } from "./answer_view.js";
import { element } from "./element.js";
import { figuresOf } from "./figures.js";

export class TurnView {
  #answers;
  #verdict = element("p", { class: "verdict" });

  /**
   * @param {string} question
   * @param {import("./answer.js").Answer[]} answers one or two
   * @param {(answer: import("./answer.js").Answer, round: number | null) => void} onSelect
   */
  constructor(question, answers, onSelect) {
    this.#answers = answers;
    this.views = answers.map(
      (answer) => new AnswerView(answer, (round) => onSelect(answer, round)),
    );
    const isCompared = answers.length > 1;
    this.root = element(
      "div",
      { class: isCompared ? "turn compared" : "turn" },
      element("div", { class: "question" }, element("p", {}, question)),
      element("div", { class: "answers" }, ...this.views.map((view) => view.root)),
    );
    if (isCompared) this.root.append(this.#verdict);
  }

  /** Draws the answers, and their comparison once both are complete. */
  update() {
    for (const view of this.views) view.update();
    if (this.#answers.length > 1 && this.#answers.every((answer) => answer.state === "done")) {
      const { isSame, words, rest } = compare(this.#answers);
      this.#verdict.classList.toggle("differs", !isSame);
      this.#verdict.replaceChildren(element("strong", {}, words), rest);
    }
  }

  /**
   * @param {import("./answer.js").Answer} answer the answer whose rounds are shown
   * @param {number | null} round
   */
  mark(answer, round) {
    for (const [place, view] of this.views.entries()) {
      const isShown = this.#answers[place] === answer;
      view.selected = isShown;
      view.mark(isShown ? round : null);
    }
  }
}

/**
 * @param {import("./answer.js").Answer[]} answers two, done
 * @returns {{isSame: boolean, words: string, rest: string}}
 */
export function compare([first, second]) {
  const [ids, otherIds] = [first.tokenIds, second.tokenIds];
  const differs = ids.findIndex((id, place) => id !== otherIds[place]);
  if (differs !== -1 || ids.length !== otherIds.length) {
    const at = differs === -1 ? Math.min(ids.length, otherIds.length) : differs;
    return { isSame: false, words: `The answers differ from token ${at + 1} on.`, rest: "" };
  }
  const [speed, otherSpeed] = [first, second].map(({ rounds }) => figuresOf(rounds).tokensPerSecond);
  const words = `Identical, all ${ids.length} tokens.`;
  if (speed === null || otherSpeed === null) return { isSame: true, words, rest: "" };
  const [fast, slow, factor] =
    speed >= otherSpeed ? [first, second, speed / otherSpeed] : [second, first, otherSpeed / speed];
  const rest = ` ${fast.label} is ${factor.toFixed(2)} times as fast as ${slow.name}.`;
  return { isSame: true, words, rest };
}
