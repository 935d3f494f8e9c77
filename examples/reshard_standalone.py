"""Sync the weights of any FSDP2 model into vLLM, in a training loop of your own.

    torchrun --nproc-per-node 2 examples/reshard_standalone.py MODEL_FOLDER

REINFORCE without our trainer; the reward is the fraction of even token ids. The lines that the
reshard needs are marked (1), (2) and (3).
"""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # (1) vLLM runs in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the same CPU cores train

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from hybridengine.integrations.vllm import reshard


def main(path: str, steps: int = 3, tp_size: int = 1) -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    llm = LLM(
        path,
        load_format="dummy",  # its weights come from the model
        dtype="float32",
        tensor_parallel_size=tp_size,
        distributed_executor_backend="external_launcher",
        weight_transfer_config={"backend": "hybridengine"},  # (2)
        max_model_len=64,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=None if gpu else 64 << 20,
        enforce_eager=True,
        seed=0,
    )
    sampling = SamplingParams(max_tokens=16, temperature=1.0, logprobs=0, seed=rank // tp_size)
    prompts = [{"prompt_token_ids": [5 + i, 7, 11]} for i in range(8)]
    for step in range(steps):
        report = reshard(model, llm)  # (3) every rank; the first call also plans
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        worst, rewards = 0.0, []
        for output in outputs:
            [response] = output.outputs
            ids = torch.tensor([*output.prompt_token_ids, *response.token_ids], device=device)
            tokens = ids[len(output.prompt_token_ids) :]
            logits = model(ids[None]).logits[0, -len(tokens) - 1 : -1]
            log_probs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None])[:, 0]
            reward = (tokens % 2 == 0).float().mean()
            (-(reward - 0.5) * log_probs.mean() / len(outputs)).backward()
            sampled = [
                p[t].logprob for p, t in zip(response.logprobs, response.token_ids, strict=True)
            ]
            worst = max(worst, (log_probs.detach().cpu() - torch.tensor(sampled)).abs().max())
            rewards.append(float(reward))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(
                f"step {step}: reward {sum(rewards) / len(rewards):.3f}, weights "
                f"{report.version} in {report.milliseconds:.0f} ms, {report.bytes_received} bytes "
                f"received, log-probs differ by at most {worst:.1e}, {world} ranks"
            )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
