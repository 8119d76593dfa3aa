/** Chooses which of several models answers; the browser stores the choice. */

import { part, refill } from "./element.js";

const NAME = "outrider-model";

export class ModelPicker {
  #select = part("model");
  #onChoice;
  /** @type {import("./client.js").Model[]} */
  #models = [];
  /** The model chosen by hand, which may not be served for a while. */
  #wanted = "";

  /** @param {(model: import("./client.js").Model, isOnly: boolean) => void} onChoice */
  constructor(onChoice) {
    this.#onChoice = onChoice;
    try {
      this.#wanted = localStorage.getItem(NAME) ?? "";
    } catch {
      // Without storage the choice lasts until the page is reloaded.
    }
    this.#select.addEventListener("change", () => this.#choose(this.#select.value));
  }

  /** @param {import("./client.js").Model[]} models at least one; the first answers by default */
  offer(models) {
    this.#models = models;
    refill(this.#select, models.map(({ id }) => [id, id]));
    part("model-field").hidden = models.length === 1;
    const chosen = models.find(({ id }) => id === this.#wanted) ?? models[0];
    this.#select.value = chosen.id;
    this.#onChoice(chosen, models.length === 1);
  }

  #choose(id) {
    this.#wanted = id;
    try {
      localStorage.setItem(NAME, id);
    } catch {
      // As above.
    }
    this.offer(this.#models);
  }
}
