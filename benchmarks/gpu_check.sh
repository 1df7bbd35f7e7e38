#!/usr/bin/env bash
# What only a machine with a GPU can show, in under 8 minutes, without a network (docs/gpu.md).
#
#   benchmarks/gpu_check.sh [--dry-run]
#
# PYTHON   interpreter with the project's packages (.venv/bin/python)
# OUT      folder for log.txt, result.json and records.jsonl (./gpu-check)
# DEVICE   cuda:0; cores such as cpu:0-1 rehearse the steps without a GPU
# STEPS    the steps to run, of those below
# TOTAL_S  seconds that all steps together may take (460)
#
# The GPU's settings stay as they are. The last line is JSON; exit status 0: all well, 1: a step is not,
# 2: no device.
set -u

PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-./gpu-check}
DEVICE=${DEVICE:-cuda:0}
TOTAL_S=${TOTAL_S:-460}
STEPS=${STEPS:-device measure faults overlap latency fleet busy doctor}
declare -A LIMITS=([device]=70 [measure]=150 [faults]=70 [overlap]=60 [latency]=150 [fleet]=200 [busy]=110 [doctor]=60)

dry=no
case "${1:-}" in
  "") ;;
  --dry-run) dry=yes ;;
  *) echo "usage: benchmarks/gpu_check.sh [--dry-run]" >&2; exit 64 ;;
esac

mkdir -p "$OUT" || exit 64
OUT=$(cd "$OUT" && pwd)
# The interpreter may be named from where the script is called.
case "$PYTHON" in
  /*) ;;
  */*) [ -x "$PYTHON" ] && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 64
scratch=$(mktemp -d) || exit 64
trap 'rm -rf "$scratch"' EXIT
: >"$OUT/log.txt"
say() { echo "$*" | tee -a "$OUT/log.txt"; }

has_device() {
  [ "${DEVICE#cuda}" = "$DEVICE" ] && return 0
  command -v nvidia-smi >/dev/null && timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# run STEP LIMIT: its entry is in $scratch/STEP.json, whatever happens to it.
run() {
  timeout -k 10 "$2" "$PYTHON" -m benchmarks.gpu_check "$1" --out "$OUT" --scratch "$scratch" --device "$DEVICE" \
    >>"$OUT/log.txt" 2>&1
  local status=$?
  [ -s "$scratch/$1.json" ] ||
    echo "{\"ok\": false, \"seconds\": $2, \"error\": \"ended with status $status after at most $2 s: see log.txt\"}" \
      >"$scratch/$1.json"
}

began=$SECONDS
status=0
if [ "$dry" = yes ] || ! has_device; then status=2; fi
for step in $STEPS; do
  limit=${LIMITS[$step]:-}
  if [ -z "$limit" ]; then
    echo "$step is no step: ${!LIMITS[*]}" >&2
    exit 64
  fi
  left=$((TOTAL_S - (SECONDS - began)))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$status" = 2 ]; then
    echo '{"ok": false, "seconds": 0, "error": "no device"}' >"$scratch/$step.json"
  elif [ "$limit" -lt 10 ]; then
    echo '{"ok": false, "seconds": 0, "error": "no time left"}' >"$scratch/$step.json"
  else
    say "== $step, at most $limit s"
    run "$step" "$limit"
  fi
  grep -q '^{"ok": true' "$scratch/$step.json" || [ "$status" = 2 ] || status=1
  say "$step: $(cut -c1-600 "$scratch/$step.json")"
done

{
  printf '{"ok": %s, "seconds": %d, "device": "%s", "steps": {' \
    "$([ "$status" = 0 ] && echo true || echo false)" $((SECONDS - began)) "$DEVICE"
  comma=
  for step in $STEPS; do
    printf '%s"%s": %s' "$comma" "$step" "$(cat "$scratch/$step.json")"
    comma=', '
  done
  printf '}}\n'
} >"$OUT/result.json"
cat "$OUT/result.json"
exit "$status"
