"""The Triton kernels of exact rollouts: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch

from hybridengine.kernels import tree_attention

pytest.importorskip("triton")

from tests.kernels import exact_cases as cases
from tests.kernels.attention.cases import forest_of, problem, results
from tests.kernels.interpreter import run_interpreted

DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES, ids=("float32", "bfloat16"))
OPTIONS = pytest.mark.parametrize("options", cases.ATTENTION.values(), ids=cases.ATTENTION)


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("interpreted_exact.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    ("decode_linear_many_bf16", "attention_path_bf16_128_plain", "attention_paged_bf16_128_plain"),
)
def test_compiles_for_hopper_without_spills(kernel):
    from tools.triton_builds import builds

    _, shared, spilled = builds(90)[kernel]()
    assert shared <= 227 * 1024
    assert spilled == 0


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("spread", (0, 12))
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(3, 64, 64), (70, 40, 33), (600, 576, 1536), (1100, 1000, 4096), (130, 96, 11008)],
)
def test_linear_on_the_gpu(dtype, rows, n, k, spread):
    cases.check_linear("cuda", rows, n, k, dtype, spread=spread)


@pytest.mark.gpu
@DTYPES
def test_slices_of_k_on_the_gpu(dtype):
    cases.check_slices_of_k("cuda", 100, 576, 1536, dtype)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("width", (1, 5, 31, 64, 128, 576, 4096, 8192))
def test_norm_on_the_gpu(dtype, width):
    cases.check_norm("cuda", width, dtype, 300)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("width", (5, 31, 64, 128, 576, 4096, 8192))
def test_layer_norm_on_the_gpu(dtype, width):
    cases.check_layer_norm("cuda", width, dtype, 300)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("width", (31, 1536, 11008))
@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "sigmoid", "softplus"))
def test_activation_on_the_gpu(dtype, activation, width):
    cases.check_activation("cuda", width, dtype, activation, 100)


@pytest.mark.gpu
@DTYPES
@OPTIONS
@pytest.mark.parametrize(
    ("heads", "dims"), [((9, 3), (64, 64)), ((8, 2), (128, 128)), ((4, 4), (256, 256))]
)
def test_paged_attention_on_the_gpu(dtype, options, heads, dims):
    cases.check_paged("cuda", dtype, options, heads, dims, scale=11)


@pytest.mark.gpu
@DTYPES
@OPTIONS
def test_shared_prefixes_on_the_gpu(dtype, options):
    cases.check_shared_prefixes("cuda", dtype, options, scale=13)


@pytest.mark.gpu
def test_rotary_tables_on_the_gpu():
    cases.check_rotary("cuda")


@pytest.mark.gpu
@DTYPES
def test_gradients_of_the_invariant_attention_on_the_gpu(dtype):
    """They are those of the other form, from its own results."""
    forest = forest_of((300, [70, (40, [280, 1])]), 130)
    case = problem(forest, 6, 2, 64, dtype=dtype)
    ends, positions = forest.subtree_ends.cuda(), forest.position_ids.cuda()

    def call(batch_invariant):
        return results(
            lambda q, k, v: tree_attention(
                q, k, v, ends, positions, batch_invariant=batch_invariant
            ),
            case,
            device="cuda",
        )

    limit = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for got, expected in zip(call(True), call(False), strict=True):
        torch.testing.assert_close(got, expected, **limit)
