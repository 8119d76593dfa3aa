/** Creates HTML and SVG elements in one call. Text is never read as markup. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Record<string, string | number | boolean | EventListener | undefined>} Attributes */

/**
 * @param {string} tag
 * @param {Attributes} [attributes] a function becomes a listener of the event by that name; true
 *   an empty attribute; false and undefined leave the attribute out
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @returns {T} the page's element with this id
 */
export function part(id) {
  const node = document.getElementById(id);
  if (node === null) throw new Error(`the page has no #${id}`);
  return /** @type {T} */ (node);
}

/**
 * Replaces the options of a select if they differ. (Replacing them closes an open list.)
 *
 * @param {HTMLSelectElement} select keeps its choice if it is still offered
 * @param {string[][]} options value and text
 */
export function refill(select, options) {
  const offered = [...select.options].map((option) => [option.value, option.text]);
  if (JSON.stringify(offered) === JSON.stringify(options)) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

/**
 * @template {Element} T
 * @param {T} made
 * @param {Attributes} attributes
 * @param {(Node | string)[]} children
 * @returns {T}
 */
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value !== undefined) {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  made.append(...children);
  return made;
}
