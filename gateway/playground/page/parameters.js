/** Reads sampling parameters and the choice of drafts from the form. */

import { part, refill } from "./element.js";

const OFF = "off";
const ANY = "any";
const NONE = "none";
/** Algorithms by usual speed-up; with several attached, the first one is the default. */
const STRONGEST = ["EAGLE3", "MTP", "EAGLE", "DFLASH", "STANDALONE", "NGRAM"];

/** @typedef {{name: string, speculation: object}} Side how to speculate a request */

export class Parameters {
  /** Whether the draft was chosen by hand. */
  #isChosen = false;

  constructor() {
    part("algorithm").addEventListener("change", () => {
      this.#isChosen = true;
    });
    const toggle = part("parameters-toggle");
    toggle.addEventListener("click", () => {
      const isOpen = toggle.getAttribute("aria-expanded") === "true";
      toggle.setAttribute("aria-expanded", String(!isOpen));
      part("parameters").hidden = isOpen;
    });
    this.offer([]);
  }

  /** @param {string[]} algorithms of the attached drafts */
  offer(algorithms) {
    const named = algorithms.map((name) => [name, name]);
    refill(part("algorithm"), [[ANY, "any draft"], ...named, [OFF, "off"]]);
    refill(part("rival"), [[NONE, "nothing"], [OFF, "off"], ...named]);
    const strongest = STRONGEST.find((name) => algorithms.includes(name));
    if (!this.#isChosen && algorithms.length > 1 && strongest !== undefined) {
      part("algorithm").value = strongest; // with "any" the target takes any draft that has room
    }
  }

  /** @returns {Side[]} the sides of the next turn: one, or two to compare */
  get sides() {
    const chosen = sideOf(part("algorithm").value);
    const rival = part("rival").value;
    return rival === NONE ? [chosen] : [chosen, sideOf(rival)];
  }

  /** @returns {string} the system prompt; empty without one */
  get system() {
    return part("system").value.trim();
  }

  /** @returns {number} the given seed, or a random one; both sides of a turn share it */
  get seed() {
    const given = part("seed").value;
    return given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : Number(given);
  }

  /** @returns {object} fields of the request, without empty ones */
  get sampling() {
    return Object.fromEntries(
      [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"]]
        .map(([id, name]) => [name, part(id).value])
        .filter(([, value]) => value !== "")
        .map(([name, value]) => [name, Number(value)]),
    );
  }
}

/**
 * @param {string} choice
 * @returns {Side}
 */
function sideOf(choice) {
  if (choice === OFF) return { name: "plain decoding", speculation: { disable: true, trace: true } };
  if (choice === ANY) return { name: "any draft", speculation: { trace: true } };
  return { name: choice, speculation: { algorithm: choice, trace: true } };
}
