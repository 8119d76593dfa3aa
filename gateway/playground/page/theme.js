/** Light, dark, or what the system says. */

const NAME = "outrider-theme";
const SIGNS = { system: "◐", light: "○", dark: "●" };
const NEXT = { system: "dark", dark: "light", light: "system" };

export class Theme {
  #button;
  #choice = "system";

  /** @param {HTMLElement} button goes round the three */
  constructor(button) {
    this.#button = button;
    button.addEventListener("click", () => this.#choose(NEXT[this.#choice]));
    let kept = null;
    try {
      kept = localStorage.getItem(NAME);
    } catch {
      // Storage may be switched off; the system's choice holds.
    }
    this.#apply(kept in SIGNS ? kept : "system");
  }

  #choose(choice) {
    this.#apply(choice);
    try {
      localStorage.setItem(NAME, choice);
    } catch {
      // As above.
    }
  }

  #apply(choice) {
    this.#choice = choice;
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    this.#button.textContent = SIGNS[choice];
    this.#button.title = `Theme: ${choice}`;
    this.#button.setAttribute("aria-label", `Theme: ${choice}; change`);
  }
}
