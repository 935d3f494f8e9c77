#!/usr/bin/env bash
# One host of a job over several. Run it on every host, with the same HEAD and its own NODE:
#   HEAD=10.0.0.1 NODES=2 NODE=0 GPUS=8 examples/two_nodes/host.sh [CONFIG] [key=value ...]
set -euo pipefail
config="$(dirname "$0")/grpo.yaml"
if [[ "${1:-}" == *.yaml ]]; then config=$1; shift; fi
exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$GPUS" \
  --master-addr "$HEAD" --master-port "${PORT:-29500}" \
  -m hybridengine.cli "${JOB:-grpo}" "$config" \
  "trainer.nnodes=$NODES" "trainer.n_gpus_per_node=$GPUS" "$@"
