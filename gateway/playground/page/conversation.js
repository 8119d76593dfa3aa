/** The conversation: sends questions, streams answers, stops them. */

import { Answer } from "./answer.js";
import { element, part } from "./element.js";
import { figuresOf } from "./figures.js";
import { RoundPanel } from "./round_panel.js";
import { TurnView } from "./turn_view.js";

const EXAMPLES = [
  "What is the capital of France?",
  "Write a short story about a dog.",
  "Write a poem about the sea.",
];

export class Conversation {
  #client;
  #parameters;
  #panel = new RoundPanel((round) => this.#mark(round));
  #transcript = part("transcript");
  /** @type {{role: string, content: string}[]} */
  #messages = [];
  /** @type {TurnView[]} */
  #turns = [];
  /** @type {Answer | null} the answer whose rounds are shown */
  #shown = null;
  /** @type {AbortController | null} */
  #running = null;
  #isDrawing = false;
  #isFollowing = true;

  /**
   * @param {import("./client.js").Client} client
   * @param {import("./parameters.js").Parameters} parameters
   * @param {(error: Error) => void} onRefused called for every failed request
   * @param {() => void} onEnded called at the end of every turn
   */
  constructor(client, parameters, onRefused, onEnded) {
    this.#client = client;
    this.#parameters = parameters;
    this.onRefused = onRefused;
    this.onEnded = onEnded;
    this.model = "";
    this.isOnlyModel = true;
    this.clear();
    this.#transcript.addEventListener("scroll", () => {
      this.#isFollowing = this.#isAtEnd();
    });
    // Panels that open below must not cover the end of the transcript.
    new ResizeObserver(() => this.#isFollowing && this.#follow()).observe(this.#transcript);
  }

  /**
   * @param {import("./client.js").Model} model that answers, as the server describes it now
   * @param {boolean} isOnly
   */
  serve(model, isOnly) {
    this.model = model.id;
    this.isOnlyModel = isOnly;
    this.#panel.serve(model);
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Deletes the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.#turns = [];
    this.#show(null);
    const ask = (text) => () => this.ask(text);
    this.#transcript.replaceChildren(
      element(
        "div",
        { class: "empty" },
        element("h2", {}, "Watch a draft ride ahead"),
        element("p", {}, "Every token of an answer shows whether the draft guessed it or the target drew it. The text is the target's own, with any draft or none."),
        element("div", { class: "examples" }, ...EXAMPLES.map((text) => element("button", { type: "button", click: ask(text) }, text))),
      ),
    );
  }

  /** Stops the streamed answers; they keep the text so far. */
  stop() {
    this.#running?.abort();
  }

  /** @param {string} question */
  async ask(question) {
    if (this.isRunning) return;
    const { seed, sides, sampling, system } = this.#parameters;
    const model = this.isOnlyModel ? null : this.model;
    const answers = sides.map((side) => new Answer(side, seed, model));
    const turn = this.#begin(question, answers);
    const body = { model: this.model, messages: this.#prompt(system, question), seed, ...sampling };
    this.#running = new AbortController();
    this.#setRunning(true);
    // One after the other: in parallel, each answer would slow down the other's measurement.
    const { signal } = this.#running;
    for (const answer of answers) await this.#stream(answer, turn, body, signal);
    this.#running = null;
    this.#end(question, answers, turn);
  }

  async #stream(answer, turn, body, signal) {
    if (signal.aborted) {
      answer.state = "stopped";
      return;
    }
    this.#show(answer);
    try {
      for await (const chunk of this.#client.chat({ ...body, speculation: answer.speculation }, signal)) {
        answer.add(chunk);
        this.#draw(turn);
      }
      answer.state = "done";
    } catch (error) {
      answer.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) this.#fail(answer, error);
    }
    turn.update();
    this.#panel.update();
  }

  #fail(answer, error) {
    answer.error = error;
    this.onRefused(error);
  }

  #begin(question, answers) {
    const turn = new TurnView(question, answers, (answer, round) => this.#select(answer, round));
    if (this.#turns.length === 0) this.#transcript.replaceChildren();
    this.#turns.push(turn);
    this.#transcript.append(turn.root);
    this.#isFollowing = true;
    this.#follow();
    return turn;
  }

  #end(question, answers, turn) {
    this.#setRunning(false);
    turn.update();
    const [first] = answers;
    const isKept = this.#turns.includes(turn); // false if the conversation was cleared meanwhile
    if (isKept && first.text !== "") {
      this.#messages.push({ role: "user", content: question }, { role: "assistant", content: first.text });
    }
    if (isKept && answers.length > 1) this.#show(first);
    part("status").textContent = spoken(answers);
    this.onEnded();
    if (this.#isFollowing) this.#follow();
  }

  #prompt(system, question) {
    const before = system === "" ? [] : [{ role: "system", content: system }];
    return [...before, ...this.#messages, { role: "user", content: question }];
  }

  /** Draws at most once a frame, however fast chunks arrive. */
  #draw(turn) {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      this.#isDrawing = false;
      turn.update();
      this.#panel.update();
      if (this.#isFollowing) this.#follow();
    });
  }

  #isAtEnd() {
    const box = this.#transcript;
    return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  }

  #follow() {
    this.#transcript.scrollTop = this.#transcript.scrollHeight;
  }

  #select(answer, round) {
    this.#show(answer);
    this.#panel.choose(round);
  }

  #show(answer) {
    this.#shown = answer;
    this.#panel.show(answer);
    this.#mark(null);
  }

  #mark(round) {
    for (const turn of this.#turns) turn.mark(this.#shown, round);
  }

  #setRunning(isRunning) {
    part("stop").hidden = !isRunning;
    part("send").hidden = isRunning;
    if (isRunning) part("status").textContent = "Answering";
  }
}

/**
 * @param {Answer[]} answers
 * @returns {string} a summary for screen readers
 */
function spoken(answers) {
  const parts = answers.map((answer) => {
    const figures = figuresOf(answer.rounds);
    const state = { done: "complete", stopped: "stopped", failed: "failed" }[answer.state];
    return `Answer ${answers.length > 1 ? `by ${answer.name} ` : ""}${state}, ${figures.numTokens} tokens.`;
  });
  return parts.join(" ");
}
