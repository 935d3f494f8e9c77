"""vLLM for a GPU machine without a network: its wheel for one GPU, and what an engine imports.

A step of gpu_rehearsal.py. The wheel has 320 MB, most of it machine code for other GPUs, quantized
products, and kernels of FlashAttention for other types and head sizes: these are zeroed, and say
that they are for another GPU, so that a driver passes them over as it does those of its libraries
that are for other GPUs alone. Other libraries lose their symbols. What the pack has is not in the
archive a second time. vLLM's own libraries are of torch's stable ABI and load with torch 2.11, for
which vLLM has no wheel; nothing else of this version is promised there.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = "0.32.0"
# What an engine imports, beside what tools/gpu_environment.txt and the pack bring.
PACKAGES = (
    *("apache-tvm-ffi==0.1.11", "cachetools", "cbor2", "cloudpickle"),
    *("compressed-tensors==0.17.0", "einops", "email-validator", "fastapi<0.137"),
    *("httpcore2", "httpx2", "llguidance<1.8", "loguru", "openai", "opentelemetry-api"),
    *("opentelemetry-sdk", "opentelemetry-semantic-conventions", "oss-harmony"),
    *("partial-json-parser", "prometheus-client", "py-cpuinfo", "pybase64"),
    *("pydantic-extra-types", "python-multipart", "pyzmq", "sniffio", "starlette"),
    *("truststore", "xgrammar==0.2.8", "aiohttp", "aiohappyeyeballs", "aiosignal", "attrs"),
    *("frozenlist", "multidict", "propcache", "requests", "urllib3", "yarl", "uvloop", "dnspython"),
)
# Of the wheels: kernels of quantized and sparse models, a server, and what is for building.
LEFT_OUT = re.compile(
    r"vllm-rs|deep_gemm/|fmha_sm100/|_vllm_fa2_C|_moe_C|_(qutlass|deepselect|flashkda|flashmla\w*)_C"
    r"|instrumentator/static/|tvm_ffi/(3rdparty|include|src)/|\.pyi$|/RECORD$"
)
FLASH = re.compile(r"flash_(fwd_(combine|hdim(64|128)_bf16)|prepare)(?!.*softcap)")
# Of vLLM's own library, by names of their kernels: products of quantized and of sparse models.
QUANTIZED = re.compile(r"marlin|machete|cutlass|gptq|vllm3awq|router_gemm|hadacore|fused_a_gemm")
MAGIC = 0xBA55ED50  # of a fat binary
ELF, PTX = 2, 1
ARCHITECTURE_AT = 28  # in the header of an entry
OTHER_GPU = 120  # of code that is zeroed

# What a run imports lazily, too; under a stub of the driver.
CHECK = """
import importlib, sys
from triton.backends.nvidia.driver import CudaDriver
CudaDriver.is_active = staticmethod(lambda: True)
import vllm.platforms as platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
from vllm.platforms.interface import DeviceCapability
Platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
Platform.get_device_name = classmethod(lambda cls, device_id=0: "H100")
platforms._current_platform = Platform()
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
MODULES = (
    *("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
    *("vllm.model_executor.layers.quantization.online.base", "vllm.device_allocator.cumem"),
    *("vllm.model_executor.models.qwen2", "vllm.model_executor.models.llama"),
    *("vllm.lora.punica_wrapper.punica_gpu", "vllm.compilation.backends"),
    "hybridengine.engine.vllm.engine",
)


class Code(NamedTuple):
    """Machine code, or PTX, of one compiled source in a fat binary."""

    kind: int
    architecture: int
    offset: int
    size: int
    header: int  # its offset


def fat_binaries(data: bytes | bytearray, begin: int, end: int) -> Iterator[list[Code]]:
    """Yield the entries of each fat binary in the section data[begin:end]."""
    while begin < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, begin)
        if magic != MAGIC:
            begin += 8  # padding
            continue
        entries, at = [], begin + header
        begin = at + size
        while at < begin:
            kind, _, own_header, own_size = struct.unpack_from("<HHIQ", data, at)
            (architecture,) = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
            entries.append(Code(kind, architecture, at + own_header, own_size, at))
            at += own_header + own_size
        yield entries


def of_architecture(architecture: int) -> Callable[[list[Code]], list[Code]]:
    """Return what chooses the code that a GPU runs: its own, else PTX."""

    def choose(entries: list[Code]) -> list[Code]:
        own = [code for code in entries if code[:2] == (ELF, architecture)]
        return own or [c for c in entries if c.kind == PTX and c.architecture <= architecture]

    return choose


def of_kernels(
    library: Path, cuobjdump: str, architecture: int, wanted: Callable[[str], object]
) -> Callable[[list[Code]], list[Code]]:
    """Return what chooses the code that a GPU runs of the sources with `wanted(their symbols)`."""
    symbols = iter(output(cuobjdump, "-symbols", library).split("Fatbin elf code:")[1:])
    own = of_architecture(architecture)

    def choose(entries: list[Code]) -> list[Code]:
        found = "".join(next(symbols) for code in entries if code.kind == ELF)
        return own(entries) if wanted(found) else []

    return choose


def is_flash(symbols: str) -> bool:
    source = re.search(r"_INTERNAL_[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}", symbols)
    return bool(source and FLASH.match(source[1]))


def is_plain(symbols: str) -> bool:
    return not QUANTIZED.search(symbols)


WANTED = {"_vllm_fa3_C.abi3.so": is_flash, "_C_stable_libtorch.abi3.so": is_plain}


def zero_others(library: Path, choose: Callable[[list[Code]], list[Code]]) -> None:
    """Zero the code in a library that `choose` does not return, and say that it is OTHER_GPU's."""
    sections = output("readelf", "-SW", library)
    found = re.search(r"\.nv_fatbin\s+\w+\s+\w+\s+(\w+)\s+(\w+)", sections)
    if found is None:
        return
    begin, size = (int(value, 16) for value in found.groups())
    data = bytearray(library.read_bytes())
    zero(data, fat_binaries(data, begin, begin + size), choose)
    library.write_bytes(data)


def zero(
    data: bytearray, binaries: Iterable[list[Code]], choose: Callable[[list[Code]], list[Code]]
) -> None:
    for entries in binaries:
        for code in set(entries).difference(choose(entries)):
            data[code.offset : code.offset + code.size] = bytes(code.size)
            struct.pack_into("<I", data, code.header + ARCHITECTURE_AT, OTHER_GPU)


def make(python: Path, work: Path, paths: list[Path], architecture: int) -> Path:
    """Make a folder of packages for the Python of `python`, and return it.

    work: folder for downloads.
    paths: of the built sources, whose engine is imported in the end, and of their packages.
    """
    wheels, site = work / "vllm-wheels", work / "vllm-site"
    shutil.rmtree(site, ignore_errors=True)
    download = (python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d")
    subprocess.run([*download, wheels, f"vllm=={VERSION}", *PACKAGES], check=True)
    names_of = {re.split("[=<>]", package)[0] for package in ("vllm", *PACKAGES)}
    for wheel in sorted(wheels.glob("*.whl")):
        if wheel.name.partition("-")[0].replace("_", "-") not in names_of:
            continue  # of an earlier call
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if not LEFT_OUT.search(name)]
            files.extractall(site, names)
    cuobjdump = next(
        python.parents[1].glob("lib/*/site-packages/triton/backends/nvidia/bin/cuobjdump")
    )
    for library in (path for path in site.rglob("*.so*") if path.is_file()):
        if site / "vllm" not in library.parents:
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
        elif wanted := WANTED.get(library.name):
            zero_others(library, of_kernels(library, str(cuobjdump), architecture, wanted))
        else:
            zero_others(library, of_architecture(architecture))
    check(python, work, [*paths, site])
    return site


def check(python: Path, work: Path, paths: list[Path]) -> None:
    """Import MODULES without a GPU, by a driver that has its symbols and does nothing."""
    stub = work / "stub"
    stub.mkdir(exist_ok=True)
    symbols = set()
    for library in (paths[-1] / "vllm").rglob("*.so"):
        symbols |= set(re.findall(r"\bU (cu[A-Z]\w+)", output("nm", "-D", library)))
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(symbols))
    (stub / "cuda.c").write_text(source)
    build = ("cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", stub / "libcuda.so.1")
    subprocess.run([*build, stub / "cuda.c"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": str(stub),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [str(python), "-c", CHECK, *MODULES]
    subprocess.run(command, cwd=paths[0], env=environment, check=True)


def output(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    )
    return done.stdout
