/** Turns `/speculation_history` into points over time and marks where weights were replaced. */

/**
 * @typedef {{begin_time: number, verified_round_count: number, accepted_token_count: number}} Interval
 * @typedef {{time: number, algorithm: string | null, weight_version: string}} WeightChange
 * @typedef {{model: string, weight_versions: string[], interval_s: number, intervals: Interval[],
 *   weight_changes: WeightChange[]}} History
 */

/**
 * @param {History} history
 * @returns {{begin: number, end: number, points: {time: number, length: number}[],
 *   marks: {time: number, label: string}[]}} seconds since the epoch. The time begins with the
 *   first interval with verified rounds, or with the first change of weights if that is earlier.
 *   `length` is tokens per round, bonus included; its time is the middle of an interval.
 */
export function courseOf(history) {
  const { intervals, interval_s: width } = history;
  const busy = intervals.filter((interval) => interval.verified_round_count > 0);
  const first = intervals[0]?.begin_time ?? 0;
  const end = (intervals.at(-1)?.begin_time ?? 0) + width;
  const changes = history.weight_changes.filter(({ time }) => time >= first && time < end);
  const starts = [...busy.map((interval) => interval.begin_time), ...changes.map(({ time }) => time)];
  return {
    begin: Math.min(end - width, ...starts),
    end,
    points: busy.map((interval) => ({
      time: interval.begin_time + width / 2,
      length: 1 + interval.accepted_token_count / interval.verified_round_count,
    })),
    marks: changes.map((change) => ({ time: change.time, label: labelOf(change) })),
  };
}

/**
 * @param {History} history
 * @returns {string} the current versions: of the target, and of each algorithm's drafts
 */
export function versionsOf(history) {
  const drafts = new Map();
  for (const change of history.weight_changes) {
    if (change.algorithm !== null) drafts.set(change.algorithm, labelOf(change));
  }
  return [`weights ${history.weight_versions.join(", ")}`, ...drafts.values()].join(" · ");
}

/** @param {WeightChange} change */
function labelOf({ algorithm, weight_version: version }) {
  return `${algorithm ?? "target"} ${version}`;
}
