#!/bin/sh
# Makes the authority, two certificates and their keys again. Tests read the files; nothing else does.
set -eu
cd "$(dirname "$0")"
days=36500
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key ca-key.pem
openssl req -x509 -new -key ca-key.pem -sha256 -days $days -subj "/CN=Kvasir test authority" \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" -out ca.pem
for name in server second; do
  key $name-key.pem
  openssl req -new -key $name-key.pem -subj "/CN=$name" -out $name.csr
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n' > $name.ext
  openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca-key.pem -CAcreateserial -sha256 -days $days \
    -extfile $name.ext -out $name.pem
  rm $name.csr $name.ext
done
rm -f ca-key.pem ca.srl
# Vouches for nobody here.
key other-ca-key.pem
openssl req -x509 -new -key other-ca-key.pem -sha256 -days $days -subj "/CN=Another authority" -out other-ca.pem
rm other-ca-key.pem
# What engines make for themselves: by its own words an authority. The second one has the same names and another key.
for name in self-signed self-signed-2; do
  key $name-key.pem
  openssl req -x509 -new -key $name-key.pem -sha256 -days $days -subj "/CN=localhost" \
    -addext "subjectAltName=DNS:localhost" -out $name.pem
done
