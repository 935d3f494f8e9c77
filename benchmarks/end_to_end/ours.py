"""Compare our advantages, loss and gradient of TRL's rollouts with those of TRL."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from tests.loading import load_sharded


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from hybridengine.kernels import group_advantage, policy_loss
    from hybridengine.model import pack_rollouts, packed_log_probs, sharding_mesh
    from hybridengine.sync.shards import full_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = load_sharded(
        job["model"],
        mesh=sharding_mesh("cpu", 1, -1),
        param_dtype=torch.float32,
    )
    lengths = [len(completion) for _, completion in job["pairs"]]
    groups = torch.arange(len(lengths)) // job["n"]
    # TRL adds 1e-4 to the standard deviation, verl 1e-6
    advantages = group_advantage(torch.tensor(job["rewards"]), groups, epsilon=1e-4)
    log_probs, _ = packed_log_probs(model, pack_rollouts(job["pairs"]))
    loss, _ = policy_loss(
        log_probs,
        log_probs.detach(),
        advantages.repeat_interleave(torch.tensor(lengths)),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        global_num_tokens=sum(lengths),
        global_num_seqs=len(lengths),
    )
    loss.backward()
    gradients = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    trl_advantages = torch.tensor(job["advantages"])
    differences = {
        "advantages (largest)": float((advantages - trl_advantages).abs().max()),
        "loss": abs(float(loss.detach()) - job["loss"]),
        "gradient norm (relative)": abs(float(norm) / job["grad_norm"] - 1),
    }
    Path(job["result"]).write_text(json.dumps(differences))


if __name__ == "__main__":
    main()
