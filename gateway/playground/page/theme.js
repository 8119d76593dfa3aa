/** The theme: light, dark, or the system's choice. */

const NAME = "outrider-theme";
const SIGNS = { system: "◐", light: "○", dark: "●" };
const NEXT = { system: "dark", dark: "light", light: "system" };

export class Theme {
  #button;
  #choice = "system";

  /** @param {HTMLElement} button switches to the next theme */
  constructor(button) {
    this.#button = button;
    button.addEventListener("click", () => this.#choose(NEXT[this.#choice]));
    let stored = null;
    try {
      stored = localStorage.getItem(NAME);
    } catch {
      // Without storage the page begins with the system's choice.
    }
    this.#apply(stored in SIGNS ? stored : "system");
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
