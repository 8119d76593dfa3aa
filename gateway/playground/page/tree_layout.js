/** Computes the positions of a candidate tree's nodes.
 *
 * Depth grows to the right. A node is level with its first child, and accepted children come first:
 * the accepted path is a straight line along the top, and other branches take the rows below.
 */

const CHARACTER = 7.3;
const GAP = 22;
const MARGIN = 12;
export const NODE_HEIGHT = 24;
const ROW = 32;
const LONGEST_LABEL = 12;

/**
 * @typedef {object} Node
 * @property {"root" | "accepted" | "rejected" | "bonus" | "plain"} kind
 * @property {number | null} index in the tree; null for the root and the target's own token
 * @property {Node | null} parent
 * @property {Node[]} children in drawing order
 * @property {string} text
 * @property {string} label the text as it is drawn: short, blanks visible
 * @property {number} id token id; -1 for the root, which stands for the text so far
 * @property {number | null} prob the draft's probability, given the parent
 * @property {number | null} pathProb product of the probabilities from the root on
 * @property {number} depth
 * @property {number} x
 * @property {number} y
 * @property {number} width
 */

/**
 * @param {import("./figures.js").Round} round
 * @param {string} before the last token before the round, shown as the root
 * @param {boolean} [isLast] whether it is the answer's last round, which may draw the end token
 * @returns {{nodes: Node[], width: number, height: number}}
 */
export function layoutOf(round, before, isLast = false) {
  const root = node("root", null, null, before, -1, null);
  const nodes = [root, ...candidates(round, root)];
  const last = round.accepted_nodes.at(-1);
  if (isLast && last !== undefined && nodes[last + 1].text === "") nodes[last + 1].label = "end";
  const drawn = round.tokens.at(-1);
  if (drawn !== undefined && drawn.source !== "accepted") {
    const parent = last === undefined ? root : nodes[last + 1];
    const own = node(drawn.source, null, parent, drawn.text, drawn.id, null);
    own.label = labelOf(drawn.text) || (isLast ? "end" : `#${drawn.id}`);
    nodes.push(own);
  }
  const numRows = placeRows(root, 0);
  const width = placeColumns(nodes);
  return { nodes, width, height: 2 * MARGIN + (numRows - 1) * ROW + NODE_HEIGHT };
}

/**
 * @param {string} text
 * @returns {string}
 */
export function labelOf(text) {
  const visible = text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const characters = [...visible];
  return characters.length <= LONGEST_LABEL
    ? visible
    : `${characters.slice(0, LONGEST_LABEL - 1).join("")}…`;
}

/**
 * @param {number} prob
 * @returns {string}
 */
export function percent(prob) {
  if (prob >= 0.995) return "100%";
  return prob < 0.01 ? "<1%" : `${Math.round(100 * prob)}%`;
}

/**
 * @param {import("./figures.js").Round} round
 * @param {Node} root
 * @returns {Node[]}
 */
function candidates(round, root) {
  const { tree, accepted_nodes: path } = round;
  if (tree === null) return [];
  const accepted = new Set(path);
  /** @type {Node[]} */
  const made = [];
  for (const [index, text] of tree.texts.entries()) {
    const parent = tree.parents[index] === null ? root : made[tree.parents[index]];
    const kind = accepted.has(index) ? "accepted" : "rejected";
    const logProb = tree.log_probs[index];
    const prob = logProb === undefined ? null : Math.exp(logProb);
    const drawn = node(kind, index, parent, text, tree.token_ids[index], prob);
    drawn.label ||= `#${drawn.id}`;
    made.push(drawn);
  }
  return made;
}

/** @returns {Node} */
function node(kind, index, parent, text, id, prob) {
  const made = {
    kind, index, parent, text, id, prob, label: labelOf(text), children: [],
    depth: parent === null ? 0 : parent.depth + 1,
    pathProb: prob === null ? null : prob * (parent?.pathProb ?? 1),
    x: 0, y: 0, width: 0,
  };
  parent?.children.push(made);
  return made;
}

/**
 * Assigns rows to a node and its descendants.
 * @param {Node} start
 * @param {number} row
 * @returns {number} the first free row below them
 */
function placeRows(start, row) {
  start.y = MARGIN + row * ROW;
  const rank = { accepted: 0, bonus: 1, plain: 1, rejected: 2, root: 2 };
  start.children.sort(
    (a, b) => rank[a.kind] - rank[b.kind] || (b.prob ?? 0) - (a.prob ?? 0),
  );
  let free = row;
  for (const child of start.children) free = placeRows(child, free);
  return Math.max(free, row + 1);
}

/**
 * Assigns a column to every depth, as wide as its widest node.
 * @param {Node[]} nodes
 * @returns {number} width of the drawing
 */
function placeColumns(nodes) {
  const widths = [];
  for (const drawn of nodes) {
    const extra = drawn.prob === null ? 0 : 33;
    drawn.width = Math.ceil([...drawn.label].length * CHARACTER) + 16 + extra;
    widths[drawn.depth] = Math.max(widths[drawn.depth] ?? 0, drawn.width);
  }
  let x = MARGIN;
  const lefts = widths.map((width) => {
    const left = x;
    x += width + GAP;
    return left;
  });
  for (const drawn of nodes) drawn.x = lefts[drawn.depth];
  return x - GAP + MARGIN;
}

