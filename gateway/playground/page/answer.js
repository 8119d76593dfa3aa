/** The state of one answer while it is streamed. Views draw it. */

/** @typedef {import("./figures.js").Round} Round */

/** @typedef {"waiting" | "streaming" | "done" | "stopped" | "failed"} State */

export class Answer {
  /**
   * @param {import("./parameters.js").Side} side how the request is speculated
   * @param {number} seed of the request
   * @param {string | null} model that answers; null if only one model is served
   */
  constructor({ name, speculation }, seed, model) {
    this.name = name;
    this.speculation = speculation;
    this.seed = seed;
    this.model = model;
    /** @type {Round[]} */
    this.rounds = [];
    /** The whole text so far. */
    this.text = "";
    /** Characters of the text that belong to tokens; the end of an answer may add a few. */
    this.numTokenCharacters = 0;
    /** @type {State} */
    this.state = "waiting";
    /** @type {Error | null} */
    this.error = null;
    /** @type {string | null} */
    this.finishReason = null;
  }

  /** The name as a heading. */
  get label() {
    return this.name[0].toUpperCase() + this.name.slice(1);
  }

  /** Whether more may come. */
  get isOpen() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** Text at the end that belongs to no token. */
  get tail() {
    return this.text.slice(this.numTokenCharacters);
  }

  /** @returns {number[]} */
  get tokenIds() {
    return this.rounds.flatMap((round) => round.tokens.map((token) => token.id));
  }

  /**
   * @param {object} chunk of `/v1/chat/completions`
   * @returns {Round[]} the new rounds
   */
  add(chunk) {
    this.state = "streaming";
    const choice = chunk.choices[0];
    if (choice === undefined) return [];
    this.text += choice.delta.content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const rounds = choice.speculation?.rounds ?? [];
    this.rounds.push(...rounds);
    for (const round of rounds) {
      for (const token of round.tokens) this.numTokenCharacters += token.text.length;
    }
    return rounds;
  }
}
