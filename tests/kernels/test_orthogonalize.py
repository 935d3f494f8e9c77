"""orthogonalize against float64, against torch's Muon, and by its matrices alone."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torchs

from hybridengine.kernels import orthogonalize
from tests.kernels.interpreter import run_interpreted

# Tall, wide, square, a vector; 400 rows are three strips of a symmetric product.
SHAPES = [(5, 13), (13, 5), (8, 8), (1, 7), (400, 410), (500, 250)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_float64_has_the_singular_vectors_and_values_near_one() -> None:
    x = draw(2, 30, 50)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert s.min() > 0.68 and s.max() < 1.21
    torch.testing.assert_close(orthogonalize(x), u @ torch.diag_embed(s) @ vh)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_close_to_float64(shape: tuple[int, int]) -> None:
    x = draw(2, *shape)
    # A step multiplies the error of a small singular value by 3.4; five of them by 480.
    assert distance(orthogonalize(x.float()), orthogonalize(x)) < 480 * 2**-22


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_close_as_torch(shape: tuple[int, int]) -> None:
    x = draw(1, *shape).bfloat16()
    exact = orthogonalize(x.double())[0]
    own = orthogonalize(x)[0]
    theirs = torchs(x[0].float(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert distance(own, exact) < 1.1 * distance(theirs, exact) + 2**-8
    if min(shape) < 192:  # one strip: the products are torch's
        assert torch.equal(own, theirs)


def test_symmetric_products_of_strips_are_those_of_full_matrices(monkeypatch) -> None:
    import sys

    x = draw(1, 70, 90).float()
    expected = orthogonalize(x.double())
    monkeypatch.setattr(sys.modules[orthogonalize.__module__], "STRIP", 16)
    assert distance(orthogonalize(x), expected) < 480 * 2**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_depends_on_another_one(dtype: torch.dtype) -> None:
    x = draw(4, 9, 14).to(dtype)
    alone = torch.cat([orthogonalize(one) for one in x.split(1)])
    assert torch.equal(orthogonalize(x), alone)
    x[1], x[2, 3, 4] = 0, torch.nan
    out = orthogonalize(x)
    assert torch.equal(out[0], alone[0]) and torch.equal(out[3], alone[3])
    assert not out[1].any() and out[2].isnan().all()


def test_the_scale_of_a_matrix_is_left_out() -> None:
    x = draw(1, 12, 7).float()
    for scale in (2.0**-10, 2.0**40):
        assert torch.equal(orthogonalize(x * scale), orthogonalize(x))


def test_no_matrices_and_empty_ones() -> None:
    for shape in ((0, 3, 4), (2, 0, 4), (2, 4, 0)):
        assert orthogonalize(torch.zeros(shape)).shape == shape


@pytest.mark.slow
def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("interpreted_orthogonalize.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orthogonalize_gram", "orthogonalize_square"])
def test_triton_compiles_for_hopper_without_spills(name: str) -> None:
    pytest.importorskip("triton")
    from tools.triton_builds import builds

    _, shared, spilled = builds(90)[name]()
    assert shared <= 227 * 1024 and spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 640, 1000), (3, 1000, 640), (1, 60, 90)])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_on_a_gpu(backend: str, shape: tuple[int, ...]) -> None:
    x = draw(*shape).bfloat16().cuda()
    exact = orthogonalize(x.double())
    on_cpu = distance(orthogonalize(x.cpu()), exact.cpu())
    assert distance(orthogonalize(x, backend=backend), exact) < 1.2 * on_cpu
