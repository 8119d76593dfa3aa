#!/usr/bin/env bash
# All that a bare GPU host is asked at once: installs the wheels that came along, widens the models,
# runs GPU tests, then `make bench-http`. Run from the repository's root.
#
#   tests/bench/on_device.sh [--tests PYTEST_ARGUMENTS] [--no-bench | BENCH_HTTP_ARGUMENTS…]
#
# Environment: WHEELS (.whl), PY (python3), WIDE (a folder in /dev/shm or TMPDIR, which is kept),
# OUT (figures, logs and JUnit results are copied there), BENCH_TIMEOUT_S (540).
set -euo pipefail
cd "$(dirname "$0")/../.."

WHEELS=${WHEELS:-.whl} PY=${PY:-python3} BENCH_TIMEOUT_S=${BENCH_TIMEOUT_S:-540}
has_room() { [ -w "$1" ] && [ "$(df --output=avail -k "$1" | tail -1)" -gt 25000000 ]; }
if [ -z "${WIDE:-}" ]; then
  if has_room /dev/shm; then WIDE=/dev/shm/outrider-wide; else WIDE=${TMPDIR:-/tmp}/outrider-wide; fi
fi
results=${OUT:-$(mktemp -d)}
export PYTHONUNBUFFERED=1

tests="" bench=1
while [ $# -gt 0 ]; do
  case $1 in
    --tests) tests=$2; shift 2 ;;
    --no-bench) bench=""; shift ;;
    *) break ;;
  esac
done

# A card that is hot before anything runs lowers its clocks under load: its figures do not count.
cards() {
  nvidia-smi --query-gpu=index,name,temperature.gpu,clocks.sm --format=csv,noheader 2> /dev/null |
    sed 's/^/on_device: card /' || true
}

status=0
cards
if [ -d "$WHEELS" ]; then
  site=$(mktemp -d)
  "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  echo "on_device: wheels installed after $SECONDS s"
fi
if [ -n "$tests" ]; then
  # shellcheck disable=SC2086 # several arguments
  "$PY" -m pytest -q -m gpu --junitxml "$results/gpu-tests.xml" $tests || status=$?
  echo "on_device: tests ended with $status after $SECONDS s"
fi
if [ -n "$bench" ]; then
  timeout --kill-after 20 "$BENCH_TIMEOUT_S" "$PY" -m tests.bench.http --widen "$WIDE" \
    --out "$results/bench-http.json" --log-dir .run/bench-http "$@" | tee "$results/bench-http.md" ||
    status=$?
  if [ -n "${OUT:-}" ]; then # few files come back from some hosts
    tar -czf "$results/logs.tar.gz" -C .run bench-http
  fi
  echo "on_device: bench ended with $status after $SECONDS s"
fi
cards
exit "$status"
