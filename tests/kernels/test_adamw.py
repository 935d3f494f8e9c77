"""adamw_ against float64, torch's fused AdamW and its own reference; hostile sizes and views."""

from functools import partial

import pytest
import torch
from hybridengine.kernels import adamw_, bit_checksum, change_mask, take_changed
from hybridengine.kernels.changes import marks
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.adamw_cases import bits, clones, lists
from tests.tolerances import ADAMW, ERROR_FACTOR, ROUNDING

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENGINE_DTYPES = (torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 31, 32, 33, 100, 4095, 16384, 16385, 50_001)
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def largest_error(params, exact):
    return max(((p.double() - e).abs().max().item() for p, e in zip(params, exact, strict=True)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("betas", "eps", "weight_decay"),
    [
        ((0.9, 0.999), 1e-8, 0.01),
        ((0.9, 0.95), 1e-6, 0.0),
        ((0.3, 0.6), 1e-8, 0.5),
        ((0.0, 0.0), 1, 1),
    ],
)
def test_updates_equal_torchs_fused_adamw(betas, eps, weight_decay, device):
    """Twenty updates; the error against float64 is at most twice that of torch."""
    sizes = [n for n in SIZES if n]
    params, _, exp_avgs, exp_avg_sqs, _ = lists(sizes, device)
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(p) for p in params] for _ in range(2))
    options = {"lr": 3e-3, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    exact = [torch.nn.Parameter(p.double()) for p in params]
    fused = torch.optim.AdamW(theirs, **options, fused=True)
    in_float64 = torch.optim.AdamW(exact, **options, foreach=False)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 21):
        grads = [torch.randn(p.shape, generator=generator).to(device) for p in params]
        steps = [torch.tensor(float(step), device=device)] * len(params)
        adamw_(params, grads, exp_avgs, exp_avg_sqs, steps, **options)
        for parameters, optimizer in ((theirs, fused), (exact, in_float64)):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
    with torch.no_grad():
        bound = ERROR_FACTOR * largest_error(theirs, exact) + ROUNDING
        assert largest_error(params, exact) <= bound
        for ours, parameter in zip(params, theirs, strict=True):
            torch.testing.assert_close(ours, parameter.detach(), **ADAMW)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine_dtype", (None, *ENGINE_DTYPES))
@pytest.mark.parametrize("grad_dtype", (torch.float32, *ENGINE_DTYPES))
@pytest.mark.parametrize("offset", (0, 1))
def test_kernel_equals_reference_and_marks_what_changed(device, grad_dtype, engine_dtype, offset):
    ours = lists(SIZES, device, grad_dtype, offset)
    before = clones(ours)[0]
    exact = clones(ours, torch.float64)
    factor = torch.tensor(0.37, device=device)
    masks = [change_mask(p) for p in ours[0]] if engine_dtype else []
    options = {**OPTIONS, "grad_factor": factor}
    checksums = adamw_(*ours, **options, changed=masks, engine_dtype=engine_dtype)
    adamw_(*exact, **options, backend="reference")
    sums = [[int(bit_checksum(t)) for t in pair] for pair in zip(before, ours[0], strict=True)]
    assert checksums.tolist() == (sums if engine_dtype else [])
    for name, tensors, expected in zip(range(5), ours, exact, strict=True):
        for tensor, one in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor.double(), one.double(), **ADAMW, msg=f"list {name}")
    share = []
    for mask, old, new in zip(masks, before, ours[0], strict=False):  # none without engine_dtype
        changed = bits(old, engine_dtype) != bits(new, engine_dtype)
        assert torch.equal(marks(mask, 32 * len(mask))[: len(new)], changed)
        assert not marks(mask, 32 * len(mask))[len(new) :].any()
        share.append(changed.float().mean().item() if len(new) else 0.5)
    if engine_dtype is not None:
        assert 0 < share[-1] < 1  # else nothing was tested


@pytest.mark.parametrize("device", DEVICES)
def test_an_element_does_not_depend_on_its_position(device):
    """So a shard's result does not depend on where the ranks split the parameter."""
    ours = lists([100_003], device)
    parts = [[t[17:], t[:17]] for t in (one[0] for one in clones(ours)[:4])]
    adamw_(*ours, **OPTIONS)
    adamw_(*parts, ours[4] * 2, **OPTIONS)
    for whole, (tail, head) in zip(ours[:4], parts, strict=True):
        assert torch.equal(whole[0], torch.cat([head, tail]))


def test_threads_do_not_change_a_bit():
    def run(threads):
        torch.set_num_threads(threads)
        ours = lists([70_001, 5, 200_000], "cpu")
        masks = [change_mask(p) for p in ours[0]]
        adamw_(*ours, **OPTIONS, changed=masks, engine_dtype=torch.bfloat16)
        taken = take_changed(masks, ours[0], dtype=torch.bfloat16)
        return [*(t for one in ours for t in one), *(t for pair in taken for t in pair)]

    threads = torch.get_num_threads()
    try:
        for one, several in zip(run(1), run(3), strict=True):
            assert torch.equal(one, several)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", (None, "reference"))
def test_an_update_with_lr_zero_changes_nothing(backend):
    """The first step of a warm-up."""
    ours = lists(SIZES, "cpu")
    before = clones(ours)[0]
    masks = [change_mask(p) for p in before]
    options = {**OPTIONS, "lr": 0.0}
    adamw_(*ours, **options, changed=masks, engine_dtype=torch.bfloat16, backend=backend)
    assert all(torch.equal(p, b) for p, b in zip(ours[0], before, strict=True))
    assert not any(mask.any() for mask in masks)


@pytest.mark.parametrize("backend", (None, "reference"))
def test_values_that_are_not_finite(backend):
    """As in torch: what is not finite stays with its element; a NaN that stays is no change."""
    grad = torch.tensor([torch.nan, torch.inf, 1.0, 0.0, 1.0])
    param = torch.tensor([1.0, 1.0, torch.nan, 1.0, torch.inf])
    mask = change_mask(param)
    zeros = [[torch.zeros(5)] for _ in range(2)]
    options = {**OPTIONS, "changed": [mask], "engine_dtype": torch.bfloat16, "backend": backend}
    adamw_([param], [grad], *zeros, [torch.ones(())], **{**options, "lr": 0.1})
    assert param.isfinite().tolist() == [False, False, False, True, False]
    assert marks(mask, 5).tolist() == [True, True, False, True, False]  # 3: weight decay


LARGE = [1e20, -3e19, 1e20, 1.0, 1e38, 0.0, 1e-3] * 5  # vectors, and a tail


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("betas", ((0.9, 0.999), (0.3, 0.4)))
def test_a_gradient_whose_square_overflows(betas, backend):
    """The parameter stays finite as in torch, whose average of squares may become infinite."""
    param = torch.linspace(-1, 1, len(LARGE))
    state = [torch.zeros(len(LARGE)) for _ in range(2)]
    theirs = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=betas, weight_decay=0.1)
    options = {**OPTIONS, "lr": 0.1, "betas": betas, "backend": backend}
    for step, scale in enumerate((1.0, 1.0, 1e-20, 0.0), 1):
        theirs.grad = torch.tensor(LARGE) * scale
        optimizer.step()
        adamw_(
            [param], [theirs.grad], *([s] for s in state), [torch.tensor(float(step))], **options
        )
        assert param.isfinite().all()
        torch.testing.assert_close(param, theirs.detach(), **ADAMW)
        assert torch.equal(state[1].isinf(), optimizer.state[theirs]["exp_avg_sq"].isinf())
        assert not state[1].isnan().any()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 300), max_size=5),
    st.sampled_from(ENGINE_DTYPES),
    st.floats(0, 1e-2),
    st.floats(0, 0.999),
    st.floats(0, 0.9999),
)
def test_any_sizes_and_options(sizes, engine_dtype, lr, beta1, beta2):
    ours, exact = lists(sizes, "cpu"), lists(sizes, "cpu")
    exact = clones(exact, torch.float64)
    masks = [change_mask(p) for p in ours[0]]
    before = clones(ours)[0]
    options = {"lr": lr, "betas": (beta1, beta2)}
    adamw_(*ours, **options, changed=masks, engine_dtype=engine_dtype if sizes else None)
    adamw_(*exact, **options, backend="reference")
    for mask, old, new, one in zip(masks, before, ours[0], exact[0], strict=True):
        torch.testing.assert_close(new.double(), one, **ADAMW)
        differ = bits(old, engine_dtype) != bits(new, engine_dtype)
        assert torch.equal(marks(mask, len(new)), differ)


def one_list(n=64):
    return [[torch.ones(n)] for _ in range(5 - 1)] + [[torch.ones(())]]


def wrong(index, tensor):
    ours = one_list()
    ours[index] = [tensor] if isinstance(tensor, torch.Tensor) else tensor
    return ours


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (wrong(1, torch.ones(63)), r"grads\[0\] has shape \[63\]"),
        (wrong(2, torch.ones(65)), r"exp_avgs\[0\] has shape \[65\]"),
        (wrong(0, torch.ones(8, 8)), r"grads\[0\] has shape \[64\], params\[0\] \[8, 8\]"),
        ([[t] for t in (*[torch.ones(8, 8).t()] * 4, torch.ones(()))], r"params\[0\] has strides"),
        (wrong(3, torch.ones(128)[::2]), r"exp_avg_sqs\[0\] has strides .2.*contiguous"),
        (wrong(1, []), "there are 0 grads and 1 params"),
        (wrong(4, torch.zeros(())), r"steps\[0\] is 0(.0)?; updates are counted from 1"),
    ],
)
def test_wrong_tensors_are_named(arguments, named, backend):
    with pytest.raises(ValueError, match=named):
        adamw_(*arguments, lr=1.0, backend=backend)
    assert all((p == 1).all() for p in arguments[0])


def test_wrong_numbers_and_masks_are_named():
    call = partial(adamw_, *one_list())
    for name, value in (("lr", -1.0), ("eps", float("nan")), ("weight_decay", -0.1)):
        with pytest.raises(ValueError, match=f"adamw_: {name} is"):
            call(**{"lr": 1.0, name: value})
    with pytest.raises(ValueError, match=r"betas\[1\] is 1.0; expected a number below 1"):
        call(lr=1.0, betas=(0.9, 1.0))
    mask = change_mask(torch.ones(64))
    with pytest.raises(ValueError, match="changed has 1 masks and engine_dtype is None"):
        call(lr=1.0, changed=[mask])
    with pytest.raises(ValueError, match=r"engine_dtype is torch\.float64; expected bfloat16"):
        call(lr=1.0, changed=[mask], engine_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"changed\[0\] has 1 elements.*expected 2 int32"):
        call(lr=1.0, changed=[mask[:1]], engine_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="grad_factor has 2 elements"):
        call(lr=1.0, grad_factor=torch.ones(2))
    with pytest.raises(ValueError, match=r"params\[0\] has dtype BFloat16; expected Float"):
        adamw_(*wrong(0, torch.ones(64, dtype=torch.bfloat16)), lr=1.0)


def test_no_tensors_is_nothing():
    adamw_([], [], [], [], [], lr=1.0)


def test_op_contract():
    ours = lists([5, 40], "cpu")
    masks = [change_mask(p) for p in ours[0]]
    arguments = (*ours, masks, 1e-3, 0.9, 0.95, 1e-8, 0.1, torch.ones(()), torch.bfloat16, None)
    torch.library.opcheck(torch.ops.hybridengine.adamw_.default, arguments)


def test_traces_without_a_break():
    ours, expected = lists([5, 40], "cpu"), lists([5, 40], "cpu")
    adamw_(*expected, **OPTIONS)
    torch.compile(lambda *given: adamw_(*given, **OPTIONS), fullgraph=True, backend="eager")(*ours)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], expected[0], strict=True))
