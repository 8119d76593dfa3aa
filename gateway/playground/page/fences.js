/** Finds tokens of code blocks: between fences of three backquotes at the start of a line. */

const FENCE = "```";

export class Fences {
  #line = "";
  #isInside = false;

  /**
   * @param {string} text of the next token
   * @returns {boolean} whether any of it is in a fenced block
   */
  holds(text) {
    let isCode = this.#isInside;
    for (const piece of text.split(/(?<=\n)/)) {
      const wasFence = this.#line.trimStart().startsWith(FENCE);
      this.#line += piece;
      if (!wasFence && this.#line.trimStart().startsWith(FENCE)) this.#isInside = !this.#isInside;
      isCode ||= this.#isInside;
      if (piece.endsWith("\n")) this.#line = "";
    }
    return isCode;
  }
}
