/** What `/speculation_history` tells, as points along time and marks of other weights. */

/**
 * @typedef {{begin_time: number, verified_round_count: number, accepted_token_count: number}} Interval
 * @typedef {{time: number, algorithm: string | null, weight_version: string}} WeightChange
 * @typedef {{model: string, weight_versions: string[], interval_s: number, intervals: Interval[],
 *   weight_changes: WeightChange[]}} History
 */

/**
 * @param {History} history
 * @returns {{begin: number, end: number, points: {time: number, length: number}[],
 *   marks: {time: number, label: string}[]}} seconds since the epoch; from the first interval with
 *   verified rounds on, or from the first change after the history's begin; `length` is tokens a
 *   round, bonus included, in the middle of an interval
 */
export function courseOf(history) {
  const { intervals, interval_s: width } = history;
  const busy = intervals.filter((each) => each.verified_round_count > 0);
  const first = intervals[0]?.begin_time ?? 0;
  const end = (intervals.at(-1)?.begin_time ?? 0) + width;
  const changes = history.weight_changes.filter(({ time }) => time >= first && time < end);
  const starts = [...busy.map((each) => each.begin_time), ...changes.map((each) => each.time)];
  return {
    begin: Math.min(end - width, ...starts),
    end,
    points: busy.map((each) => ({
      time: each.begin_time + width / 2,
      length: 1 + each.accepted_token_count / each.verified_round_count,
    })),
    marks: changes.map((each) => ({ time: each.time, label: labelOf(each) })),
  };
}

/**
 * @param {History} history
 * @returns {string} the versions in force: the target's, and the last that each kind of draft took
 */
export function versionsOf(history) {
  const drafts = new Map();
  for (const each of history.weight_changes) {
    if (each.algorithm !== null) drafts.set(each.algorithm, labelOf(each));
  }
  return [`weights ${history.weight_versions.join(", ")}`, ...drafts.values()].join(" · ");
}

/** @param {WeightChange} change */
function labelOf({ algorithm, weight_version: version }) {
  return `${algorithm ?? "target"} ${version}`;
}
