/** Keeps the API key in this tab, until the tab is closed. */

const NAME = "outrider-key";

export class KeyStore {
  #key = "";

  constructor() {
    try {
      this.#key = sessionStorage.getItem(NAME) ?? "";
    } catch {
      // Without storage the key lasts until the page is reloaded.
    }
  }

  /** @returns {string} empty when there is none */
  get() {
    return this.#key;
  }

  /** @param {string} key */
  set(key) {
    this.#key = key;
    try {
      sessionStorage.setItem(NAME, key);
    } catch {
      // As above.
    }
  }
}
