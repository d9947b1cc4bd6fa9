#!/bin/sh
# Makes a Debian package of a built binary: the binary, its unit, manual pages and completions. Needs dpkg-deb.
#
#   deploy/debian/package.sh target/dist/kvasir OUT.deb
#
# Nothing is started by installing it. Settings and the admin token are in /etc/kvasir; the token is made at first.
set -eu
binary=$(realpath "$1")
out=$(realpath -m "$2")
here=$(realpath "$(dirname "$0")")
version=$("$binary" --version | sed 's/^kvasir //; s/ .*//')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

install -D -m 755 "$binary" "$root/usr/bin/kvasir"
install -D -m 644 "$here/../systemd/kvasir.service" "$root/usr/lib/systemd/system/kvasir.service"
install -D -m 644 "$here/../systemd/kvasir.socket" "$root/usr/lib/systemd/system/kvasir.socket"
install -D -m 644 "$here/kvasir.toml" "$root/etc/kvasir/kvasir.toml"
install -D -m 644 "$here/../../LICENSE" "$root/usr/share/doc/kvasir/copyright"
page() { mkdir -p "$root/usr/share/man/man1" && "$binary" man $2 | gzip -9n >"$root/usr/share/man/man1/$1.1.gz"; }
page kvasir ""
# Commands that have a page of their own: those with options.
commands=$("$binary" help | sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\) .*/\1/p')
for command in $commands; do
  if "$binary" man "$command" >/dev/null 2>&1; then page "kvasir-$command" "$command"; fi
done
mkdir -p "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" "$root/usr/share/fish/vendor_completions.d"
"$binary" completions bash >"$root/usr/share/bash-completion/completions/kvasir"
"$binary" completions zsh >"$root/usr/share/zsh/vendor-completions/_kvasir"
"$binary" completions fish >"$root/usr/share/fish/vendor_completions.d/kvasir.fish"

mkdir "$root/DEBIAN"
sed "s/@VERSION@/$version/; s/@ARCH@/$(dpkg --print-architecture)/; s/@SIZE@/$(du -sk "$root" | cut -f1)/" "$here/control" >"$root/DEBIAN/control"
echo /etc/kvasir/kvasir.toml >"$root/DEBIAN/conffiles"
install -m 755 "$here/postinst" "$here/prerm" "$root/DEBIAN/"
dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$root" "$out" >/dev/null
echo "$out"
