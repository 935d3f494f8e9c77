"""GRPO steps of a random model with the shape of Qwen2 0.5B, on one device, by phase.

The engine is vLLM where it is installed, else Hugging Face `generate`. Prompts and responses vary
in length: prompts by their text, responses because many tokens end one. Every phase that the
trainer times is a row, as soon as a step ends; `step` has tokens per second (`tokens_per_s`), peak
memory, and `steps`, how many there are beside the first one: 0 are the times of that one.
`update_actor` has the share of the device's peak (MFU, as the trainer reports it). On a GPU
`hybridengine_eager` comes first, whose engine starts fastest: without graphs and compiled layers.
`hybridengine_compile` is the same run as `hybridengine` with `model.compile`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, ROOT, Bench

STEPS = 4  # after one warm-up step
LIMIT_S = {"cuda": 130, "cpu": 900}  # of a run; on a GPU all fit the part of the report
IMPLEMENTATIONS = {
    f"{OURS}_eager": {"rollout.enforce_eager": "true"},
    OURS: {"model.compile": "false"},
    f"{OURS}_compile": {"model.compile": "true"},
}
COMMAND = ("-m", "hybridengine.train.start", "grpo")
REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return crc32(solution_str.encode()) / 2**32  # no two responses alike: no zero advantages
"""


def run(bench: Bench) -> None:
    on_gpu = bench.device.type == "cuda"
    prompts, n, prompt_tokens, tokens = (16, 8, 512, 256) if on_gpu else (4, 4, 32, 8)
    steps = 1 if bench.quick else STEPS
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        millions = write_model(folder / "model", tiny=not on_gpu, mean_tokens=tokens)
        write_prompts(folder / "train.jsonl", prompts * (steps + 1), prompt_tokens)
        (folder / "reward.py").write_text(REWARD)
        settings = {
            "model.path": folder / "model",
            "data.train_files": folder / "train.jsonl",
            "data.train_batch_size": prompts,
            "data.max_prompt_length": prompt_tokens,
            "data.max_response_length": tokens,
            "rollout.n": n,
            "rollout.max_num_seqs": 64,  # Hugging Face keeps the logits of every token
            "reward.custom_reward_function.path": folder / "reward.py",
            "trainer.total_training_steps": steps + 1,
            "trainer.logger": "[jsonl]",
            "trainer.n_gpus_per_node": 1,
            "trainer.save_freq": -1,
        }
        shape = f"{millions}M {prompts}x{n} responses"
        for impl, own in list(IMPLEMENTATIONS.items())[0 if on_gpu else 1 :]:
            if bench.results.keep({"pass": "step", "steps": steps}, op="step", impl=impl):
                continue
            run_dir = folder / impl
            of_run = settings | own | {"trainer.default_local_dir": run_dir}
            try:
                for rows in train(run_dir, of_run, LIMIT_S[bench.device.type]):
                    add_rows(bench, impl, shape, rows)
            except Exception:  # the next one still runs
                traceback.print_exc()
                failed.append(impl)
    assert not failed, f"runs that failed: {', '.join(failed)}; see above"


def add_rows(bench: Bench, impl: str, shape: str, rows: list[dict[str, float]]) -> None:
    """Put a row for every phase of the steps, the longest first and `step` last.

    rows: metrics of the steps so far, whose first one is not counted once there are more.
    """
    bench.rows[:] = [row for row in bench.rows if row["impl"] != impl]
    steps, rows = len(rows) - 1, rows[1:] or rows
    names = {key for row in rows for key in row if key.startswith("timing_s/")}
    longest_first = sorted(names, key=lambda key: -median(row.get(key, 0.0) for row in rows))
    for name in sorted(longest_first, key=lambda key: key == "timing_s/step"):
        times = sorted(row.get(name, 0.0) * 1e3 for row in rows)
        phase, totals = name.removeprefix("timing_s/"), dict[str, Any]()
        if phase == "step":
            totals["tokens_per_s"] = median(row["perf/throughput"] for row in rows)
            peaks = [row.get("perf/max_memory_allocated_gb") for row in rows]
            totals["peak_mib"] = max(p * 2**10 for p in peaks if p) if any(peaks) else None
        if phase == "update_actor":
            totals["share_of_limit"] = median(row["perf/mfu/actor"] for row in rows)
        rate = totals.get("tokens_per_s")
        bench.add(
            "step",
            phase,
            impl,
            shape,
            f" {rate:.0f} tokens/s" if rate else "",
            dtype="bfloat16" if bench.device.type == "cuda" else "float32",
            steps=steps,
            ms_p20=times[len(times) // 5],
            ms_p50=median(times),
            ms_p80=times[len(times) * 4 // 5],
            **totals,
        )


def write_model(folder: Path, *, tiny: bool, mean_tokens: int) -> int:
    """Write a random Qwen2 with a byte tokenizer to `folder`; return its millions of parameters.

    So many tokens end a response that it has `mean_tokens` tokens on average, if nothing else does.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes = (512, 64, 128, 2, 2, 1) if tiny else (151936, 896, 4864, 24, 14, 2)
    shape: dict[str, Any] = dict(zip(names, sizes, strict=True))
    end = 256
    config = Qwen2Config(**shape, tie_word_embeddings=True, eos_token_id=end)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # 30 s on a slow host
        model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16)
    vocab_size = config.vocab_size
    ends = range(end, vocab_size, max(1, (vocab_size - end) * mean_tokens // vocab_size))
    model.generation_config = GenerationConfig(eos_token_id=list(ends), do_sample=True)
    model.save_pretrained(folder)
    vocab = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {f"w{i}": i for i in range(end + 1, vocab_size)} | {"<|endoftext|>": end}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return round(sum(p.numel() for p in model.parameters()) / 1e6)


def write_prompts(file: Path, count: int, max_tokens: int) -> None:
    """Write `count` prompts of 1/4 to all of `max_tokens` letters, a token each."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        letters = draw.choices("abcdefgh", k=draw.randint(max_tokens // 4, max_tokens))
        prompt = [{"role": "user", "content": "".join(letters)}]
        rows.append(
            {"data_source": "random", "prompt": prompt, "reward_model": {"ground_truth": ""}}
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(
    run_dir: Path, settings: dict[str, Any], limit_s: float
) -> Iterator[list[dict[str, float]]]:
    """Run the trainer as the only rank; yield the metrics of all steps so far after each."""
    from hybridengine.run.config import config_to_yaml, load_config

    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    file = run_dir.with_suffix(".yaml")
    file.write_text(config_to_yaml(config))
    # As torchrun's agent: this process holds the store, the rank connects to it.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    one_rank: dict[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    one_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    one_rank |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "step"}
    command = [sys.executable, *COMMAND, str(file)]
    environment = os.environ | {key: str(value) for key, value in one_rank.items()}
    end, seen = monotonic() + limit_s, 0
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        while process.poll() is None:
            if monotonic() > end:
                raise TimeoutError(f"the trainer was not finished after {limit_s} s")
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if len(rows := finished_steps(run_dir / "metrics.jsonl")) > seen:
                seen = len(rows)
                yield rows
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"the trainer ended with exit code {process.returncode}; see above")


def finished_steps(metrics: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps; the last line may not be whole."""
    text = metrics.read_text() if metrics.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if "timing_s/step" in row]
