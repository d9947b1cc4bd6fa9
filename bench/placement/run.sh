#!/usr/bin/env bash
# The whole table: answers compared, then instructions (callgrind), then times. Run from this directory.
set -euo pipefail
cargo build --release
binary=${CARGO_TARGET_DIR:-target}/release/placement-bench
for workers in 8 64 512 4096; do
  for blocks in 64 1024; do
    "$binary" check "$workers" "$blocks"
    for who in kvasir peer; do
      # With 4,096 workers callgrind sees 20 active requests each: 200 give the same figure in ten times as long.
      ./count.sh "$binary" "$who" "$workers" "$blocks" $((workers > 512 ? 20 : 100)) $((workers > 512 ? 20 : 200))
      "$binary" "$who" "$workers" "$blocks" 1000
    done
  done
done
