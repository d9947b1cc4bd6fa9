#!/usr/bin/env bash
# Generated workloads and, where there is one, a trace: the linear cost at its default and with other weights, placement by seconds
# learned from nothing, and the same told the true profile. usage: replay.sh KVASIR [TRACE]
set -eu
kvasir=$1 trace=${2:-}
policies=(--policy kv --policy kv,router-prefill-load-scale=4 --policy kv,router-prefill-load-scale=16 --policy kv,router-prefill-load-scale=32
  --policy time --policy time,engine-profile=h200-llama-8b)
run() {
  echo "== kvasir replay $*"
  "$kvasir" replay --seeds "${SEEDS:-3}" --jobs "${JOBS:-1}" "${policies[@]}" "$@"
}
four=(--workers 4)
run "${four[@]}" --workload documents,requests=900,rate=9,documents=60,output=200
run "${four[@]}" --workload agents,tasks=60,rate=1.2,siblings=10,output=150
run "${four[@]}" --num-blocks 3000 --workload chat,sessions=60,rate=1.5,turns=8,tenants=4,system=2500,user=400,output=120,think-ms=4000
run "${four[@]}" --workload tenants,requests=1500,rate=40,tenants=6,system=3000,output=120
run "${four[@]}" --num-blocks 2500 --workload chat,sessions=200,rate=3,turns=6,system=1500,output=150,think-ms=5000
run "${four[@]}" --num-blocks 6000 --workload documents,requests=900,rate=6,documents=60,output=150
run "${four[@]}" --replicas 2 --replica-sync --workload documents,requests=700,rate=8,documents=60,output=150
run "${four[@]}" --replicas 2 --workload documents,requests=700,rate=8,documents=60,output=150
run "${four[@]}" --worker-speed 2=50@20 --workload documents,requests=800,rate=9,documents=80,output=150
run "${four[@]}" --worker-speed 2=50@0 --worker-speed 3=50@0 --workload documents,requests=700,rate=6,documents=80,output=150
if [ -n "$trace" ]; then
  run --trace "$trace" --speed 1.0,2.5,3.0
  run --trace "$trace" --workers 4 --speed 0.7 --worker-speed 2=50@0 --worker-speed 3=50@0
  run --trace "$trace" --workers 32 --speed 11
fi
