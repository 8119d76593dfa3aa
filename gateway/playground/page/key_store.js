/** The API key, for as long as the tab lives and nowhere else. */

const NAME = "outrider-key";

export class KeyStore {
  #key = "";

  constructor() {
    try {
      this.#key = sessionStorage.getItem(NAME) ?? "";
    } catch {
      // Storage may be switched off; then the key lives as long as the page.
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
