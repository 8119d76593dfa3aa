/** Asks regularly what is served, and asks the user for a key if the server needs one. */

import { part } from "./element.js";

const INTERVAL_MS = 10_000;

export class ServerStatus {
  #client;
  #onServed;

  /**
   * @param {import("./client.js").Client} client
   * @param {(models: import("./client.js").Model[]) => void} onServed
   */
  constructor(client, onServed) {
    this.#client = client;
    this.#onServed = onServed;
    part("key-form").addEventListener("submit", (event) => this.#takeKey(event));
  }

  /** Asks now, and then every `INTERVAL_MS`. */
  async run() {
    await this.ask();
    setTimeout(() => this.run(), INTERVAL_MS);
  }

  /** Asks once and shows the answer. */
  async ask() {
    try {
      const models = await this.#client.served();
      part("key-form").hidden = true;
      this.#onServed(models);
    } catch (error) {
      if (error.status === 401) this.askForKey();
      else this.#show("down", error.message);
    }
  }

  /**
   * @param {import("./client.js").Model} model that answers
   * @param {boolean} isOnly false if the picker shows the model's name
   */
  showUp({ id, algorithms }, isOnly) {
    const drafts = algorithms.join(", ") || "no draft";
    this.#show("up", isOnly ? `${id} · ${drafts}` : drafts);
  }

  /** Shows the form for the key: the server refused a request without a valid key. */
  askForKey() {
    const form = part("key-form");
    this.#show("down", "an API key is needed");
    part("key-problem").textContent = this.#client.keys.get() === "" ? "" : "This key is not accepted.";
    if (form.hidden) {
      form.hidden = false;
      part("key").focus();
    }
  }

  #takeKey(event) {
    event.preventDefault();
    this.#client.keys.set(part("key").value.trim());
    this.ask();
  }

  #show(state, words) {
    part("server-dot").className = `dot ${state}`;
    if (part("server").textContent === words) return; // screen readers announce every change
    part("server").textContent = words;
    part("server").title = words;
  }
}
