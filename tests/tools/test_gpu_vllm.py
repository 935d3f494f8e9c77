"""Code for other GPUs is zeroed in a library of vLLM, and nothing else changes."""

from __future__ import annotations

import random
import struct

from tools.gpu_vllm import (
    ELF,
    MAGIC,
    OTHER_GPU,
    PTX,
    Code,
    fat_binaries,
    is_flash,
    is_plain,
    of_architecture,
    zero,
)

HEADER = 64  # of an entry


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    fields = struct.pack("<HHIQIIHHI", kind, 1, HEADER, len(code), 0, 0, 0, 0, architecture)
    return fields.ljust(HEADER, b"\0") + code


def binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(content)) + content


def test_the_entries_of_each_fat_binary_are_found_behind_padding() -> None:
    code = [random.Random(i).randbytes(8 * (i + 1)) for i in range(3)]
    first = binary(entry(ELF, 80, code[0]), entry(ELF, 90, code[1]))
    data = bytes(8) + first + bytes(16) + binary(entry(PTX, 80, code[2]))
    found = [*fat_binaries(data, 0, len(data))]
    assert [[e[:2] for e in entries] for entries in found] == [[(2, 80), (2, 90)], [(1, 80)]]
    codes = [data[e.offset : e.offset + e.size] for entries in found for e in entries]
    assert codes == code


def test_a_gpu_runs_its_own_code_and_else_ptx_that_is_no_newer() -> None:
    choose = of_architecture(90)
    own, older, newer = Code(ELF, 90, 0, 1, 0), Code(ELF, 80, 1, 1, 0), Code(ELF, 100, 2, 1, 0)
    ptx, newer_ptx = Code(PTX, 80, 3, 1, 0), Code(PTX, 100, 4, 1, 0)
    assert choose([older, own, newer, ptx]) == [own]
    assert choose([older, newer, ptx, newer_ptx]) == [ptx]
    assert choose([older, newer]) == []


def test_code_that_is_not_chosen_is_zero_and_of_another_gpu() -> None:
    own, other = (random.Random(i).randbytes(24) for i in range(2))
    data = bytearray(binary(entry(ELF, 90, own), entry(PTX, 80, other)))
    zero(data, fat_binaries(data, 0, len(data)), of_architecture(90))
    assert data == binary(entry(ELF, 90, own), entry(PTX, OTHER_GPU, bytes(24)))
    zero(data, fat_binaries(data, 0, len(data)), lambda entries: [])
    left = [code for entries in fat_binaries(data, 0, len(data)) for code in entries]
    assert of_architecture(90)(left) == []
    assert data == binary(*(entry(kind, OTHER_GPU, bytes(24)) for kind in (ELF, PTX)))


def test_kernels_of_quantized_products_and_other_head_sizes_are_not_wanted() -> None:
    assert is_plain("_ZN4vllm23rotary_embedding_kernelIN3c108BFloat16ES")
    assert not is_plain("_ZN7cutlass13device_kernelIN4vllm24cutlass_3x_gemm")
    for name, is_wanted in {
        "flash_fwd_hdim128_bf16_paged_sm90": True,
        "flash_fwd_combine": True,
        "flash_fwd_hdim128_bf16_softcap_sm90": False,
        "flash_fwd_hdim256_bf16_sm90": False,
        "flash_fwd_hdim64_e4m3_sm90": False,
    }.items():
        assert is_flash(f"_INTERNAL_0123abcd_9_{name}_cu_0123abcd") == is_wanted
