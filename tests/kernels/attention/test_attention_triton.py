"""tree_attention in Triton: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch

from hybridengine.kernels import tree_attention
from tests.kernels.attention import nonfinite_cases
from tests.kernels.attention.cases import forest_of, problem, random_forest
from tests.kernels.attention.triton_cases import OPTIONS, assert_exact, ours
from tests.kernels.cuda_graph import capture
from tests.kernels.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("attention/interpreted_attention.py")


@pytest.mark.slow
def test_values_that_are_not_finite_in_the_interpreter():
    run_interpreted("attention/interpreted_nonfinite.py")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ("forward", "query_grad", "key_grad"))
def test_compiles_for_hopper_without_spills(kernel):
    from tools.triton_builds import builds

    registers, shared, spilled = builds(90)[f"attention_{kernel}_bf16_128_plain"]()
    assert registers <= 255
    assert shared <= 227 * 1024
    assert spilled == 0


def test_tiles_fit_the_tables():
    from hybridengine.kernels.attention.triton_tiles import choose_tiles

    for capability in (80, 90, 100):
        for size in (64, 96, 256):
            for itemsize in (2, 4):
                for plain in (True, False):
                    m, n, *_ = choose_tiles("forward", size, itemsize, capability, plain)
                    assert m % n == 0
                    m, n, *_ = choose_tiles("query_grad", size, itemsize, capability, plain)
                    assert m % n == 0
                    m, n, *_ = choose_tiles("key_grad", size, itemsize, capability, plain)
                    assert n % m == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (320, 64)]
)
def test_on_the_gpu(dim, dim_v, sinks, option, dtype):
    forest = forest_of((300, [70, (40, [280, 1])]), 130, (17, [90] * 8))
    case = problem(forest, 6, 2, dim, dim_v, dtype, sinks=sinks)
    assert_exact(case, "cuda", dtype, scale=0.1, **OPTIONS[option])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_forests_on_the_gpu(seed):
    case = problem(random_forest(1000, seed, longest=200), 4, 2, 64, dtype=torch.bfloat16)
    assert_exact(case, "cuda", torch.bfloat16, **list(OPTIONS.values())[seed % 4])


@pytest.mark.gpu
def test_the_same_bits_in_every_run():
    case = problem(forest_of((700, [300] * 5)), 8, 2, 64, dtype=torch.bfloat16, sinks=True)
    first = ours(case, "cuda")
    for _ in range(3):
        for got, expected in zip(ours(case, "cuda"), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("spoilt", ("query", "key", "value", "grad"))
def test_values_that_are_not_finite_stay_in_their_sequences(spoilt, value, dtype):
    nonfinite_cases.check("cuda", dtype, 15, spoilt, value, batch_invariant=True)


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_forest_at_every_replay():
    """Captured with one forest, replayed with others of as many tokens; the host never waits."""
    forests = [forest_of((200, [100] * 4)), forest_of(*[60] * 10), forest_of((1, [599]))]
    case = problem(forests[0], 4, 2, 64, dtype=torch.bfloat16)
    q, k, v = (x.cuda().requires_grad_() for x in case.qkv)
    ends, grad = case.forest.subtree_ends.cuda(), case.grad.cuda()
    positions = case.forest.position_ids.int().cuda()

    def step():
        out = tree_attention(q, k, v, ends, positions, window_size=150)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    graph, captured = capture(step)
    for forest in forests:
        ends.copy_(forest.subtree_ends)
        positions.copy_(forest.position_ids)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    tokens, heads, dim = 131_200, 128, 128
    q = torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
    k, v = (torch.randn_like(q[:, :1]).requires_grad_() for _ in range(2))
    ends = torch.full((tokens,), tokens, dtype=torch.int32, device="cuda")
    last = tokens - 300
    ends[:last] = torch.arange(1, last + 1, device="cuda")  # every other token sees itself alone
    out = tree_attention(q, k, v, ends)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    q_, k_, v_ = (x[last:].detach().requires_grad_() for x in (q, k, v))
    part = tree_attention(q_, k_, v_, ends[last:] - last)
    expected = torch.autograd.grad(part.float().square().sum(), (q_, k_, v_))
    assert torch.equal(out[:last], v[:last].expand_as(q[:last]))
    for got, exact in zip((out, *grads), (part, *expected), strict=True):
        torch.testing.assert_close(got[last:], exact, rtol=2.0**-6, atol=2.0**-6)
