"""vLLM alone with random weights of a small model, from its simplest form up: does it generate?

Each step is a process of its own, of LIMIT_S seconds, two at a time, so that one that fails leaves
the others. A step that fails with the second model runner, vLLM's default, is tried with the first
one (`VLLM_USE_V2_MODEL_RUNNER=0`). A row has the milliseconds of the start and of the first
generation, and `steps`, what was done; or `note`, the error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks._bench import ROOT, Bench
from hybridengine.engine.vllm.environment import vllm_available

LIMIT_S = {"cuda": 60, "cpu": 600}
TOKENS = 8
_EAGER = {"enforce_eager": True}
STEPS: dict[str, dict[str, Any]] = {
    "eager": _EAGER | {"attention_backend": "TRITON_ATTN"},
    "flash_attention": _EAGER | {"attention_backend": "FLASH_ATTN"},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "sleep": _EAGER | {"enable_sleep_mode": True},
    "linear_attention": _EAGER | {"gdn_prefill_backend": "triton"},
}
ON_CPU = ("eager", "linear_attention")
RUNNERS = ("second", "first")


def run(bench: Bench) -> None:
    device = bench.device.type
    if not vllm_available():
        bench.leave_out("vllm_start", "first token", "", torch.bfloat16, {"vllm": "not installed"})
        return
    names = [name for name in STEPS if device == "cuda" or name in ON_CPU]
    if left_out := STEPS.keys() - {*names}:
        print(f"# vllm_start: skipped, since they need a GPU: {', '.join(sorted(left_out))}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        tried = pool.map(lambda name: (name, attempts(name, device, Path(folder))), names)
        failed = [name for name, outcomes in tried if not add_rows(bench, name, outcomes)]
    assert not failed, f"steps without a token: {', '.join(failed)}"


def add_rows(bench: Bench, name: str, outcomes: dict[str, dict[str, Any]]) -> bool:
    """Add a row for each runner that was tried; return whether one generated."""
    for runner, outcome in outcomes.items():
        impl = f"vllm_{runner}_runner"
        if "note" in outcome:
            why = {impl: outcome["note"]}
            bench.leave_out("vllm_start", "first token", name, torch.bfloat16, why)
        else:
            bench.add("vllm_start", "first token", impl, name, dtype="bfloat16", **outcome)
    return any("note" not in outcome for outcome in outcomes.values())


def attempts(name: str, device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of each runner, up to the first that generates."""
    outcomes = {}
    for runner in RUNNERS if device == "cuda" else RUNNERS[1:]:  # a CPU has the first one alone
        outcomes[runner] = outcome = attempt(name, device, folder, runner)
        if "note" not in outcome:
            break
    return outcomes


def attempt(name: str, device: str, folder: Path, runner: str) -> dict[str, Any]:
    file = folder / f"{name} {runner}.json"
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "second"))}
    command = [sys.executable, "-m", "benchmarks.vllm_start", name, device, str(file)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S[device],
        )
    except subprocess.TimeoutExpired as error:
        output: Any = error.stdout or b""
        print(output.decode()[-4000:], flush=True)
        return {"note": f"not finished after {LIMIT_S[device]} s; see the log"}
    if done.returncode or not file.is_file():
        print(done.stdout[-6000:], flush=True)
        errors = re.findall(r"^\S*(?:Error|Exception)\b.*", done.stdout, re.MULTILINE) or [""]
        return {"note": f"exit code {done.returncode}: {errors[-1]}"[:500]}
    outcome: dict[str, Any] = json.loads(file.read_text())
    return outcome


def generate(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Start an engine of the step, generate, and what else it does; return times and steps."""
    from hybridengine.engine.vllm.environment import (
        CPU_BLOCK_SIZE,
        models_inspected_here,
        prepare_environment,
    )

    prepare_environment()
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM, SamplingParams

    options = STEPS[name]
    if device == "cpu":
        options = _EAGER | {"block_size": CPU_BLOCK_SIZE}
    started, steps = time.perf_counter(), list[str]()
    path = write_config(folder / name, linear_attention=name == "linear_attention")
    with models_inspected_here():
        llm = LLM(
            path,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.1,
            disable_log_stats=True,
            **options,
        )
    steps.append("start")
    start_ms = (time.perf_counter() - started) * 1e3
    prompts: Any = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 17, 64)]
    parameters = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0, detokenize=False)

    def tokens() -> list[Sequence[int]]:
        return [done.outputs[0].token_ids for done in llm.generate(prompts, parameters)]

    begin = time.perf_counter()
    first = tokens()
    first_ms = (time.perf_counter() - begin) * 1e3
    assert [len(ids) for ids in first] == [TOKENS] * len(prompts), first
    steps.append("generate")
    if options.get("enable_sleep_mode"):
        before = torch.cuda.mem_get_info()[0]
        llm.sleep(level=2)
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed > 0, f"level 2 freed {freed} bytes"
        steps.append("sleep")
        llm.wake_up()
        llm.collective_rpc(_fill)
        steps.append("wake")
        assert [len(ids) for ids in tokens()] == [TOKENS] * len(prompts)
        steps.append("generate again")
    return {"ms_p50": first_ms, "start_ms": start_ms, "steps": steps}


def _fill(worker: Any) -> None:
    """Write the weights, which level 2 has discarded."""
    for parameter in worker.get_model().parameters():
        parameter.data.normal_(0, 0.02)


def write_config(folder: Path, linear_attention: bool) -> str:
    """Write the configuration of a model of some 20M parameters; return its folder."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True}
    kind = "qwen3"
    if linear_attention:
        kind = "qwen3_5_text"
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config = AutoConfig.for_model(kind, **sizes)
    config.architectures = ["Qwen3_5ForCausalLM" if linear_attention else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    step, where, result = sys.argv[1:]
    outcome = generate(step, where, Path(result).parent)
    Path(result).write_text(json.dumps(outcome))
