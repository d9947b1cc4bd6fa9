#!/bin/sh
# Packs a built binary for a release: an archive with manual pages and completions, and a Debian package. Runs the binary, so it
# runs on the machine that the binary is for.
#
#   deploy/release/pack.sh BINARY amd64|arm64 OUT-FOLDER
set -eu
binary=$(realpath "$1") arch=$2
mkdir -p "$3"
out=$(realpath "$3")
root=$(realpath "$(dirname "$0")/../..")
version=$("$binary" --version | sed 's/^kvasir //; s/ .*//')
name=kvasir-$version-linux-$arch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/$name

install -D -m 755 "$binary" "$folder/kvasir"
install -m 644 "$root/LICENSE" "$root/README.md" "$root/CHANGELOG.md" "$folder/"
mkdir "$folder/man" "$folder/completions"
"$binary" man >"$folder/man/kvasir.1"
for shell in bash zsh fish; do "$binary" completions "$shell" >"$folder/completions/kvasir.$shell"; done
# COMPRESSION=none is for tests: a debug build is large.
compress() { if [ "${COMPRESSION:-}" = none ]; then cat; else gzip -9n; fi; }
# The same files give the same archive.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime='2026-01-01 00:00Z' -C "$work" -cf - "$name" | compress >"$out/$name.tar.gz"
"$root/deploy/debian/package.sh" "$binary" "$out/kvasir_${version}_$arch.deb" >/dev/null
ls "$out"
