#!/usr/bin/env bash
# One host of a job over several. Run it on every host, with the same HEAD and its own NODE:
#   HEAD=10.0.0.1 NODES=2 NODE=0 GPUS=8 examples/launch/host.sh [CONFIG] [key=value ...]
# With rollout.servers also RANKS=9: one more, which sends requests to the servers.
# SIGTERM and SIGINT stop the job without loss: the ranks finish their step and save a checkpoint.
# Exit code: 0 finished; 3 stopped by SIGTERM, the same command resumes; 130 by SIGINT; else failed.
set -euo pipefail
config="$(dirname "$0")/grpo.yaml"
if [[ "${1:-}" == *.yaml ]]; then config=$1; shift; fi
stopped=0
# A session of its own: a signal to this process group would make torchrun end its ranks in 30 s.
setsid torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${RANKS:-$GPUS}" \
  --master-addr "$HEAD" --master-port "${PORT:-29500}" \
  -m hybridengine "${JOB:-grpo}" "$config" \
  "trainer.nnodes=$NODES" "trainer.n_gpus_per_node=$GPUS" "$@" &
agent=$!
stop() { stopped=$1; pkill -TERM -P "$agent" || true; }  # its children: the ranks of this host
trap 'stop 3' TERM
trap 'stop 130' INT
code=0
while kill -0 "$agent" 2>/dev/null; do code=0; wait "$agent" || code=$?; done
if ((code && stopped)); then exit "$stopped"; fi
exit "$code"
