"""vLLM alone with random weights of a small model, from its simplest form up: does it generate?

Each step is a process of its own, of LIMIT_S seconds at most. The simplest one runs before the
others, with both model runners at once: vLLM's default, the second, and the first
(`VLLM_USE_V2_MODEL_RUNNER=0`). The others run at once, so that one that hangs takes no time of
them: with the second runner, and if that fails with the first one. A runner that failed the
simplest step is left out, unless both did. All end after WHOLE_S. A row has the milliseconds of the
start and of the first generation, and `steps`, what was done; or `note`, the error.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks._bench import ROOT, Bench
from hybridengine.engine.vllm.environment import vllm_available
from tools.gpu_report import end_processes

LIMIT_S = {"cuda": 60, "cpu": 600}
WHOLE_S = {"cuda": 115, "cpu": 1200}  # tools/gpu_calls/1.sh gives 130
COMMAND = (sys.executable, "-m", "benchmarks.vllm_start")
TOKENS = 8
_EAGER = {"enforce_eager": True}
STEPS: dict[str, dict[str, Any]] = {
    "eager": _EAGER | {"attention_backend": "TRITON_ATTN"},
    "flash_attention": _EAGER | {"attention_backend": "FLASH_ATTN"},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    # vLLM asserts that memory of the device becomes free: more than the others take meanwhile.
    "sleep": _EAGER | {"enable_sleep_mode": True, "kv_cache_memory_bytes": 4 << 30},
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
    runners = RUNNERS if device == "cuda" else RUNNERS[1:]  # a CPU has the first one alone
    generated: set[tuple[str, str]] = set()
    end = time.monotonic() + WHOLE_S[device]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(STEPS)) as pool:

        def try_all(calls: Sequence[tuple[str, Sequence[str]]]) -> None:
            tried = [pool.submit(attempts, *call, device, Path(folder), end) for call in calls]
            for done in as_completed(tried):
                for (name, runner), outcome in done.result().items():
                    if add_row(bench, name, f"vllm_{runner}_runner", outcome):
                        generated.add((name, runner))

        simplest, *others = names
        try_all([(simplest, [runner]) for runner in runners])
        working = [runner for runner in runners if (simplest, runner) in generated] or runners
        try_all([(name, working) for name in others])
    failed = {*names} - {name for name, _ in generated}
    assert not failed, f"steps without a token: {', '.join(sorted(failed))}"


def add_row(bench: Bench, name: str, impl: str, outcome: dict[str, Any]) -> bool:
    """Add the row of an attempt; return whether it generated."""
    if note := outcome.get("note"):
        bench.leave_out("vllm_start", "first token", name, torch.bfloat16, {impl: note})
        return False
    bench.add("vllm_start", "first token", impl, name, dtype="bfloat16", **outcome)
    return True


def attempts(
    name: str, runners: Sequence[str], device: str, folder: Path, end: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the outcome of each runner, up to the first that generates."""
    outcomes = {}
    for runner in runners:
        outcomes[name, runner] = outcome = attempt(name, runner, device, folder, end)
        if "note" not in outcome:
            break
    return outcomes


def attempt(name: str, runner: str, device: str, folder: Path, end: float) -> dict[str, Any]:
    """Run a step up to `end`, of time.monotonic(), and end all that it started."""
    base = folder / f"{name} {runner}"
    base.mkdir()
    result, log = base / "result.json", base / "log"
    limit_s = max(0.0, min(LIMIT_S[device], end - time.monotonic()))
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "second"))}
    command = [*COMMAND, name, device, str(result)]
    with log.open("wb") as file:  # a pipe would wait for the children of one that hangs
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, process_group=0
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_processes(process.pid)
            process.wait()
    output = log.read_text(errors="replace")
    if code is None:
        print(output[-4000:], flush=True)
        return {"note": f"not finished after {limit_s:.0f} s; see the log"}
    if code or not result.is_file():
        print(output[-6000:], flush=True)
        errors = re.findall(r"^\S*(?:Error|Exception)\b.*", output, re.MULTILINE) or [""]
        return {"note": f"exit code {code}: {errors[-1]}"[:500]}
    outcome: dict[str, Any] = json.loads(result.read_text())
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
            gpu_memory_utilization=0.1,
            disable_log_stats=True,
            **{"kv_cache_memory_bytes": 64 << 20, **options},
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
