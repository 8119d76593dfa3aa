/** Computes the figures of an answer from its rounds, so by the target's clock. */

/**
 * @typedef {{id: number, text: string, source: "accepted" | "bonus" | "plain"}} Token
 * @typedef {{token_ids: number[], texts: string[], parents: (number | null)[],
 *   log_probs: number[]}} Tree
 * @typedef {{round: number, algorithm: string | null, rows: number, wait_ms: number,
 *   verify_ms: number, draft_ms: number | null, tree: Tree | null, accepted_nodes: number[],
 *   tokens: Token[]}} Round
 */

/**
 * @typedef {object} Figures
 * @property {number} numRounds
 * @property {number} numTokens
 * @property {number | null} tokensPerSecond of the rounds after the first, which reads the prompt
 * @property {number | null} tokensPerRound of the rounds that verified a tree, bonus included
 * @property {number | null} hitRate share of the rounds after the first that had a tree
 * @property {{reached: number, accepted: number}[]} positions for each tree position, how many
 *   verified trees reach it and in how many it was accepted
 */

/**
 * @param {Round[]} rounds
 * @returns {Figures}
 */
export function figuresOf(rounds) {
  const later = rounds.slice(1);
  const verified = rounds.filter((round) => round.tree !== null);
  const laterMs = sum(later.map((round) => round.wait_ms + round.verify_ms));
  const laterTokens = sum(later.map((round) => round.tokens.length));
  return {
    numRounds: rounds.length,
    numTokens: sum(rounds.map((round) => round.tokens.length)),
    tokensPerSecond: laterMs > 0 ? (1000 * laterTokens) / laterMs : null,
    tokensPerRound: ratio(sum(verified.map((round) => round.tokens.length)), verified.length),
    hitRate: ratio(later.filter((round) => round.tree !== null).length, later.length),
    positions: positionsOf(verified),
  };
}

/**
 * @param {Tree} tree
 * @returns {number[]} the depth of each node; 1 for children of the last committed token
 */
export function depthsOf(tree) {
  const depths = [];
  for (const parent of tree.parents) depths.push(parent === null ? 1 : depths[parent] + 1);
  return depths;
}

/**
 * @param {number | null} value
 * @param {number} digits
 * @returns {string}
 */
export function shown(value, digits) {
  return value === null ? "–" : value.toFixed(digits);
}

/**
 * @param {Round[]} verified
 * @returns {{reached: number, accepted: number}[]}
 */
function positionsOf(verified) {
  const positions = [];
  for (const round of verified) {
    const depth = Math.max(...depthsOf(round.tree));
    for (let place = 0; place < depth; place += 1) {
      positions[place] ??= { reached: 0, accepted: 0 };
      positions[place].reached += 1;
      if (place < round.accepted_nodes.length) positions[place].accepted += 1;
    }
  }
  return positions;
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/**
 * @param {number} part
 * @param {number} whole
 */
function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}
