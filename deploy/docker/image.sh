#!/bin/sh
# Makes an image of a static binary, with whatever builds images here: docker, podman or buildah.
#
#   deploy/docker/image.sh BINARY TAG [more arguments for the builder]
set -eu
binary=$1 tag=$2
shift 2
here=$(realpath "$(dirname "$0")")
certificates=${CERTIFICATES:-/etc/ssl/certs/ca-certificates.crt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ldd "$binary" 2>/dev/null | grep -q '=>'; then
  echo "image.sh: $binary is linked to libraries that the image does not have; build it for a musl target" >&2
  exit 1
fi
install -m 755 "$binary" "$work/kvasir"
install -m 644 "$certificates" "$work/ca-certificates.crt"
for builder in ${BUILDER:-docker podman buildah}; do
  command -v "$builder" >/dev/null || continue
  # The form of Docker's images has a health check; that of the OCI has none.
  case "$builder" in docker) form= ;; *) form=--format=docker ;; esac
  exec "$builder" build $form --file "$here/Dockerfile.binary" --tag "$tag" "$@" "$work"
done
echo "image.sh: none of docker, podman and buildah is installed" >&2
exit 1
