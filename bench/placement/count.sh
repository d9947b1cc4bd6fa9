#!/usr/bin/env bash
# Instructions per decision and per end, counted by callgrind: exact on a noisy machine.
# Usage: count.sh <binary> <kvasir|peer> <workers> <blocks> [decisions] [active per worker]
set -euo pipefail
binary=$1 who=$2 workers=$3 blocks=$4 count=${5:-100} active=${6:-200}
for part in decide end; do
  log=$(mktemp)
  valgrind --tool=callgrind --callgrind-out-file=/dev/null --collect-atstart=no \
    "--toggle-collect=placement_bench::measured_$part*" "$binary" "$who" "$workers" "$blocks" "$count" "$active" 2>"$log" >/dev/null
  total=$(sed -n 's/.*Collected : \([0-9]*\).*/\1/p' "$log")
  echo "$who $workers $blocks $part $((total / count))"
  rm -f "$log"
done
