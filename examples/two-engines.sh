#!/usr/bin/env bash
# Two mock vLLM servers, the router in front, the same prompt twice.
#
#   KVASIR=target/release/kvasir examples/two-engines.sh
#
# Everything listens on loopback and ends with this script.
set -euo pipefail
kvasir=${KVASIR:-kvasir}
port=${PORT:-18800}
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT

for n in 1 2; do
  "$kvasir" mocker --http-host 127.0.0.1 --http-port $((port + n)) --model-name qwen \
    --kv-events-port $((port + 10 * n)) --log-level warn &
  pids+=($!)
done
"$kvasir" frontend --http-host 127.0.0.1 --http-port "$port" --log-level warn \
  --worker "http://127.0.0.1:$((port + 1))" --worker "http://127.0.0.1:$((port + 2))" &
pids+=($!)

for _ in $(seq 200); do
  [ "$("$kvasir" workers --url "http://127.0.0.1:$port" 2>/dev/null | grep -c serving)" = 2 ] && break
  sleep 0.1
done

ask() {
  curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "qwen", "max_tokens": 8,
    "messages": [
      {"role": "system", "content": "You answer questions about parcels. Be short, be exact, and say which rule of the post office you used, every time, even where it seems plain."},
      {"role": "user", "content": "When does my parcel leave if I bring it at noon?"}]}' |
    python3 -c 'import json, sys; usage = json.load(sys.stdin)["usage"]; print(usage["prompt_tokens"], "prompt tokens,", usage["prompt_tokens_details"]["cached_tokens"], "cached")'
}
ask
sleep 0.3 # its cache events are on their way
ask
"$kvasir" workers --url "http://127.0.0.1:$port"
