"""A real vLLM server for tests: how it is started, what it says, which weights it should have."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridengine.kernels.block_quantize import block_quantize
from hybridengine.remote.servers import VllmServer
from tests.forked import ForkedProcess
from tests.ports import free_port
from tests.ranks import message_of

__all__ = [
    "BLOCK",
    "ENTRY",
    "START_S",
    "TIMEOUT_S",
    "expected_digests",
    "metric",
    "serving",
    "serving_options",
]

START_S = 900  # of a server; a minute where nothing else runs
TIMEOUT_S = 60.0
BLOCK = 32  # tokens of a block of the prefix cache
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # `vllm serve` of vllm-cpu has no version


@contextmanager
def serving(
    model: str,
    tp_size: int,
    folder: Path,
    fp8: bool = False,
    images: bool = False,
    exact: bool = False,
    inner: bool = False,
    **more: Any,
) -> Iterator[VllmServer]:
    """more: options of `vllm serve`, with _ for -."""
    port = free_port()
    process = start(model, port, tp_size, folder, fp8, images, exact, inner, **more)
    server = VllmServer(f"http://127.0.0.1:{port}", 0, TIMEOUT_S)
    try:
        deadline = time.monotonic() + START_S
        while "no error" not in message_of(server.check_health):
            late = process.poll() is not None or time.monotonic() > deadline
            assert not late, "\n".join(process.output())[-5000:]
            time.sleep(0.2)
        yield server
    finally:
        process.kill_all()


def start(
    model: str,
    port: int,
    tp_size: int,
    folder: Path,
    fp8: bool,
    images: bool,
    exact: bool,
    inner: bool,
    **more: Any,
) -> ForkedProcess:
    """Start a server, with `folder` on its import path.

    Its steps are slow while there is a file folder / slow.
    fp8: with FP8 weights. Their matrix product is the tests' own.
    images: of a model that takes them, also without torchvision.
    exact: with the operators of a trained model that has `use_exact_operators`.
    inner: the language model alone of one with a tower, also without torchvision.
    """
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "load-format": "dummy",
        "tensor-parallel-size": tp_size,
        "max-model-len": 512,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 16 << 20,
        "block-size": BLOCK,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": '{"backend": "hybridengine"}',
        "additional-config": json.dumps({"hybridengine_exact": exact}),
    }
    plugins = {
        "forks": "tests.extras.remote.forked_engine:fork_engine",
        "slow": "tests.extras.remote.slow_decoding:slow_down_steps",
        "flips": "tests.extras.remote.bit_flips:allow_bit_flips",
    }
    if fp8:
        options |= {"dtype": "bfloat16", "quantization": "fp8_per_block"}
        plugins["kernel"] = "tests.sync.quantized_kernel:register_kernel"
    flags = ["--enable-scale-out", "--enforce-eager"]
    if images:
        options |= {"limit-mm-per-prompt": '{"video": 0, "audio": 0}'}
        flags += ["--no-mm-device-do-normalize", "--skip-mm-profiling"]
        plugins["images"] = "tests.extras.vision.server_plugin:prepare"
    else:
        flags.append("--skip-tokenizer-init")
    if inner:
        flags.append("--language-model-only")
    options |= {key.replace("_", "-"): value for key, value in more.items()}
    write_plugins(folder, plugins)
    arguments = [x for key, value in options.items() for x in (f"--{key}", str(value))]
    paths = [folder, root := Path(__file__).parents[3]]
    if inner and importlib.util.find_spec("torchvision") is None:
        paths.append(root / "tests" / "architectures" / "stubs")
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SLOW_DECODING_FILE": str(folder / "slow"),
        "SERVED_MODEL": model,
    }
    if fp8:
        environment["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles its quantization
    command = [sys.executable, "-m", ENTRY, *arguments, *flags]
    return ForkedProcess(command, uses_vllm=True, env=environment)


def write_plugins(folder: Path, functions: Mapping[str, str]) -> None:
    """Make a server with `folder` on its import path call functions (module:name) as it starts."""
    metadata = folder / "test_plugins-1.dist-info"
    metadata.mkdir(exist_ok=True)
    lines = [f"{name} = {function}" for name, function in functions.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: test_plugins\nVersion: 1\n")


def serving_options(words: list[str]) -> Namespace:
    """Return the options of a server, those behind `vllm serve`, as vLLM reads them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
        rows = answer.read().decode().splitlines()
    return sum(float(row.split()[-1]) for row in rows if row.startswith(f"vllm:{name}{{"))


def expected_digests(
    model: str,
    tp_size: int,
    factor: float,
    quantized: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, str]:
    """SHA-256 of each weight as vLLM slices a llama over ranks; worked out by hand."""
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    full = {name: (tensor * factor).to(dtype) for name, tensor in full.items()}
    weights = {}
    for rank in range(tp_size):

        def rows(name: str, rank: int = rank) -> torch.Tensor:
            return full[name].chunk(tp_size)[rank]

        own = {}
        for name, tensor in full.items():
            if "embed_tokens" in name:  # 101 rows, padded to 128
                padded = torch.zeros(128, tensor.shape[1], dtype=dtype)
                padded[:101] = tensor
                own[name] = padded.chunk(tp_size)[rank]
            elif "norm" in name:
                own[name] = tensor
            elif "q_proj" in name:
                parts = [rows(name.replace("q_proj", x)) for x in ("q_proj", "k_proj", "v_proj")]
                own[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            elif "gate_proj" in name:
                parts = [rows(name), rows(name.replace("gate", "up"))]
                own[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
            elif "o_proj" in name or "down_proj" in name:
                own[name] = tensor.chunk(tp_size, dim=1)[rank]
        if quantized:
            own = {name: tensor.bfloat16() for name, tensor in own.items()}
            for name in [n for n in own if "_proj" in n]:
                own[name], own[f"{name}_scale_inv"] = block_quantize(own[name], backend="reference")
        for name, tensor in own.items():
            bits = tensor.contiguous().view(torch.uint8)
            digest = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
            weights[f"dp0:pp0:pcp0:tp{rank}:{name}"] = digest
    return weights
