"""The packed attention function against plain attention of each sequence, in float64."""

import itertools
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels.attention.flash import FlashPair
from hybridengine.model import flash_attention
from hybridengine.model.attention import causal_mask, varlen_attention
from hybridengine.model.flash_attention import (
    FlashKernel,
    choose_flash_kernel,
    find_flash_kernel,
    torch_kernel,
)
from hybridengine.run.errors import ModelError
from tests.kernels.attention.flash_in_float64 import PAIR


class Layer(torch.nn.Module):
    layer_idx = 3
    is_causal = True


LAYER = Layer()


def oracle(q, k, v, lengths, scaling, window=None, softcap=None, sinks=None):
    """q [T, H, D], k and v [T, H_kv, D] -> [T, H, D]: one sequence at a time, in the open."""
    outputs, start = [], 0
    groups = q.shape[1] // k.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        qi, ki, vi = q[rows], k[rows].repeat_interleave(groups, 1), v[rows]
        scores = torch.einsum("qhd,khd->hqk", qi, ki) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, vi.repeat_interleave(groups, 1)))
        start += length
    return torch.cat(outputs)


def packed(q, k, v, lengths, **options):
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    rows = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out, _ = varlen_attention(
        LAYER,
        *rows,
        None,
        cu_seq_lens_q=cu,
        cu_seq_lens_k=cu,
        max_length_q=max(lengths, default=0),
        **options,
    )
    return out[0]


def random_qkv(total, heads, kv_heads, dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, heads, dim), (total, kv_heads, dim), (total, kv_heads, dim)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def random_sinks(heads):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(heads, generator=generator, dtype=torch.float64).requires_grad_()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(sum),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 7, 100]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_forward_and_gradients_match_the_oracle(lengths, heads, window, softcap, has_sinks):
    q, k, v = random_qkv(sum(lengths), *heads, 8)
    sinks = random_sinks(heads[0]) if has_sinks else None
    leaves = [q, k, v, sinks] if has_sinks else [q, k, v]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = dict(sliding_window=window, softcap=softcap, s_aux=sinks)
    out = packed(q, k, v, lengths, scaling=0.4, **options)
    expected = oracle(q, k, v, lengths, 0.4, window, softcap, sinks)
    # softcap weights go through float32-or-wider softmax, here float64: rounding only
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("options", ({}, {"sliding_window": 40}, {"softcap": 2.0}))
def test_rows_of_one_sequence_with_sinks(options, masked):
    """Without cu_seq_lens_q: two rows of 300 tokens; a mask as transformers builds it."""
    rows = [random_qkv(300, 4, 2, 8, seed=seed) for seed in (1, 2)]
    q, k, v = (torch.stack(x).transpose(1, 2) for x in zip(*rows, strict=True))
    sinks, mask = random_sinks(4), None
    if masked:
        distance = torch.arange(300)[:, None] - torch.arange(300)
        mask = ((distance >= 0) & (distance < options.get("sliding_window", 300)))[None, None]
    out, _ = varlen_attention(LAYER, q, k, v, mask, scaling=0.4, s_aux=sinks, **options)
    window, softcap = options.get("sliding_window"), options.get("softcap")
    expected = [oracle(*row, [300], 0.4, window, softcap, sinks) for row in rows]
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_flash_attention_is_not_asked_for_sinks(monkeypatch):
    """Its gradients know nothing of them."""

    def fail(*_):
        pytest.fail("called")

    monkeypatch.setattr(flash_attention, "flash_pair", lambda *_: FlashPair(fail, fail))
    use(monkeypatch, torch_kernel())
    q, k, v = random_qkv(32, 4, 2, 8)
    sinks = random_sinks(4)
    out = packed(q, k, v, [20, 12], scaling=0.3, s_aux=sinks)
    torch.testing.assert_close(out, oracle(q, k, v, [20, 12], 0.3, sinks=sinks))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (300, 30.0)])
def test_long_sequences_cross_query_blocks(window, softcap):
    lengths = [700, 3, 530]
    q, k, v = random_qkv(sum(lengths), 4, 2, 16)
    out = packed(q, k, v, lengths, scaling=0.25, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(
        out, oracle(q, k, v, lengths, 0.25, window, softcap), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
def test_result_does_not_depend_on_other_sequences(dtype, window):
    lengths = [33, 5, 64, 41, 33, 1]
    q, k, v = random_qkv(sum(lengths), 6, 3, 32, dtype)
    together = packed(q, k, v, lengths, scaling=0.2, sliding_window=window)
    again = packed(q, k, v, lengths, scaling=0.2, sliding_window=window)
    assert torch.equal(together, again)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = packed(q[rows], k[rows], v[rows], [length], scaling=0.2, sliding_window=window)
        assert torch.equal(together[rows], alone)
        start += length


def test_bfloat16_stays_near_the_oracle():
    lengths = [50, 17, 90]
    q, k, v = random_qkv(sum(lengths), 4, 2, 32, torch.bfloat16)
    out = packed(q, k, v, lengths, scaling=0.2)
    expected = oracle(q.double(), k.double(), v.double(), lengths, 0.2)
    # bf16 keeps 8 bits: the rounding of weights and output, each half an ulp of values near 1
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_kernels_stay_near_the_oracle(dtype, window):
    lengths = [50, 17, 90]
    q, k, v = (x.detach() for x in random_qkv(sum(lengths), 4, 2, 32, dtype))
    on_device = [x.cuda().requires_grad_() for x in (q, k, v)]
    on_host = [x.double().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    out = call(*on_device, cu_seq_lens_q=cu, max_length_q=90, scaling=0.2, sliding_window=window)
    expected = oracle(*on_host, lengths, 0.2, window)
    # as on the CPU: half an ulp of bf16 for each rounding; TF32 is off, so float32 is far inside
    tolerance = (
        dict(rtol=2e-2, atol=2e-2) if dtype is torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    )
    torch.testing.assert_close(out[0][0].double().cpu(), expected, **tolerance)
    ours = torch.autograd.grad(out[0].float().square().sum(), on_device)
    theirs = torch.autograd.grad(expected.square().sum(), on_host)
    for a, b in zip(ours, theirs, strict=True):
        scale = b.abs().max()
        torch.testing.assert_close(a.double().cpu() / scale, b / scale, **tolerance)


@dataclass(frozen=True)
class OnCpu(FlashKernel):
    """A flash-attention kernel for tensors of a CPU."""

    def fits(self, q, v, softcap):
        return True


def use(monkeypatch, kernel):
    """Make attention call a kernel, with the function and options that it has."""
    on_cpu = OnCpu(**{field.name: getattr(kernel, field.name) for field in fields(kernel)})
    monkeypatch.setattr(flash_attention, "chosen_kernel", on_cpu)


@pytest.mark.parametrize("window", [None, 7])
def test_torchs_flash_attention_differentiates_by_its_two_passes(monkeypatch, window):
    """Its forward and backward are a stand-in in float64, whose log-sum-exp is float32."""
    lengths = [20, 3, 9]
    monkeypatch.setattr(flash_attention, "flash_pair", lambda *_: PAIR)
    use(monkeypatch, torch_kernel())
    q, k, v = random_qkv(32, 4, 2, 8)
    out = packed(q, k, v, lengths, scaling=0.3, sliding_window=window)
    expected = oracle(q, k, v, lengths, 0.3, window)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, wanted = (torch.autograd.grad(x, [q, k, v], grad) for x in (out, expected))
    torch.testing.assert_close((out, *found), (expected, *wanted), rtol=1e-5, atol=1e-6)


PACKAGES = ["flash_attn", "flash_attn_interface", "flash_attn.cute"]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("package", PACKAGES)
def test_each_flash_attention_gets_its_arguments(monkeypatch, package, window):
    """Number 4 has the lengths in other places, names an unlimited window None and returns the
    log-sum-exp; the others do not.
    """
    lengths, is_newest = [20, 3, 9], package == "flash_attn.cute"

    def attend(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
    ):
        assert causal and cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 20, 23, 32]
        assert max_seqlen_q == max_seqlen_k == 20
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        unlimited = (None if is_newest else -1, 0)
        assert window_size == (unlimited if window is None else (6, 0))
        out = oracle(q, k, v, lengths, softmax_scale, window, softcap or None)
        return (out, None) if is_newest else out

    for name in PACKAGES:  # the others are not installed
        module = SimpleNamespace(flash_attn_varlen_func=attend) if name == package else None
        monkeypatch.setitem(sys.modules, name, module)
    capability = {"flash_attn": 8, "flash_attn_interface": 9, "flash_attn.cute": 10}[package]
    use(monkeypatch, find_flash_kernel(capability))
    q, k, v = random_qkv(32, 4, 2, 8)
    out = packed(q, k, v, lengths, scaling=0.3, sliding_window=window, softcap=2.0)
    torch.testing.assert_close(out, oracle(q, k, v, lengths, 0.3, window, 2.0))
    torch.use_deterministic_algorithms(True)
    try:
        packed(q, k, v, lengths, scaling=0.3, sliding_window=window, softcap=2.0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_newest_flash_attention_that_fits_the_gpu_is_chosen(monkeypatch):
    def install(*packages):
        for name in PACKAGES:
            module = SimpleNamespace(flash_attn_varlen_func=name) if name in packages else None
            monkeypatch.setitem(sys.modules, name, module)
        return [find_flash_kernel(capability).function for capability in (8, 9, 10)]

    assert install(*PACKAGES) == PACKAGES
    assert install("flash_attn") == ["flash_attn"] * 3
    assert install("flash_attn", "flash_attn_interface")[1:] == PACKAGES[1::-1]
    install()
    kernel = find_flash_kernel(9)
    assert not kernel.has_softcap, "torch's kernel"
    q = torch.empty(4, 2, 64, dtype=torch.bfloat16)
    assert not kernel.fits(q, q, None), "a CPU has none"


def test_gradients_are_in_a_fixed_order_where_a_job_asks_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention, "chosen_kernel", None)
    flags = []
    try:
        for name, deterministic in (("cpu", True), ("cuda", False), ("cuda", True)):
            choose_flash_kernel(torch.device(name), deterministic)
            flags.append(torch.are_deterministic_algorithms_enabled())
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert flags == [False, False, True]


def test_default_scaling_is_one_over_root_of_head_dim():
    q, k, v = random_qkv(12, 4, 2, 16)
    torch.testing.assert_close(packed(q, k, v, [12]), oracle(q, k, v, [12], 0.25))


REFUSED = {
    "dropout": (dict(dropout=0.1), "attention dropout 0.1"),
    "position bias": (dict(position_bias=torch.zeros(1)), "the argument 'position_bias'"),
    "a number": (dict(logit_bias=0.5, s_aux=torch.zeros(4)), "the argument 'logit_bias'"),
    "bidirectional": (dict(is_causal=False), "bidirectional attention"),
    "attention maps": (dict(output_attentions=True), "output_attentions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_features_name_layer_and_feature(case):
    options, message = REFUSED[case]
    q, k, v = random_qkv(6, 4, 2, 8)
    with pytest.raises(ModelError, match=rf"Layer \(layer 3\) uses {message}") as raised:
        packed(q, k, v, [6], **options)
    assert "attn_implementation" not in str(raised.value), "no key of the configuration"


def call(q, k, v, mask=None, **options):
    rows = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return varlen_attention(LAYER, *rows, mask, **options)


@pytest.mark.parametrize("window", [None, 4])
def test_a_forest_attends_along_its_paths(window):
    """A prompt of 5 tokens with responses of 3 and 4, then a sequence of 6."""
    q, k, v = random_qkv(18, 4, 2, 8)
    paths = [[*range(8)], [*range(5), *range(8, 12)], [*range(12, 18)]]
    ends = torch.tensor([12] * 5 + [8] * 3 + [12] * 4 + [18] * 6, dtype=torch.int32)
    depths = torch.tensor([*range(8), *range(5, 9), *range(6)])
    cu = torch.tensor([0, 12, 18], dtype=torch.int32)
    options = {"cu_seq_lens_q": cu, "subtree_ends": ends, "sliding_window": window}
    out = call(q, k, v, tree_position_ids=depths, scaling=0.3, **options)[0][0]
    for path in paths:
        expected = oracle(q[path], k[path], v[path], [len(path)], 0.3, window)
        torch.testing.assert_close(out[path], expected, rtol=1e-10, atol=1e-12)
    if window:
        with pytest.raises(ModelError, match="without tree_position_ids"):
            call(q, k, v, **options)


@pytest.mark.parametrize("edges", [[0, 5], [1, 6], [0, 4, 2, 6], [0, 7]])
def test_wrong_cu_seqlens_are_refused(edges):
    q, k, v = random_qkv(6, 4, 2, 8)
    with pytest.raises(ModelError, match=r"starts at 0, does not decrease and ends at"):
        call(q, k, v, cu_seq_lens_q=torch.tensor(edges, dtype=torch.int32))


def test_packing_without_cu_seqlens_is_refused():
    q, k, v = random_qkv(6, 4, 2, 8)
    with pytest.raises(ModelError, match="position_ids that restart"):
        call(q, k, v, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_mask_with_cu_seqlens_is_refused():
    q, k, v = random_qkv(6, 4, 2, 8)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ModelError, match="an attention_mask and cu_seq_lens_q"):
        call(q, k, v, torch.ones(1, 1, 6, 6, dtype=torch.bool), cu_seq_lens_q=cu)


def test_no_mask_is_built_for_packed_input():
    options = SimpleNamespace(batch_size=1, q_length=9, kv_length=9, device="cpu")
    assert causal_mask(**vars(options)) is None
    assert causal_mask(**vars(options), allow_is_causal_skip=False) is None
