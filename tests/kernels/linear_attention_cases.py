"""Problems of causal_conv1d and linear_recurrence, for every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridengine.kernels import causal_conv1d, linear_recurrence
from tests import tolerances

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_convolution(
    lengths, channels, width, *, bias=True, initial=False, dtype=torch.float32, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(sum(lengths), channels).to(dtype),
        "weight": normal(channels, width),
        "bias": normal(channels) if bias else None,
        "initial_state": normal(len(lengths), width - 1, channels).to(dtype) if initial else None,
    }


def segments(lengths, parents=None):
    options = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    if parents is not None:
        options["parents"] = torch.tensor(parents, dtype=torch.int64)
    return options


def run_convolution(inputs, options, backend, dtype=None, device="cpu"):
    """Return the output and the gradients of a fixed function of it."""
    given = {
        name: None if x is None else x.detach().to(device, dtype or x.dtype).requires_grad_()
        for name, x in inputs.items()
    }
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out = causal_conv1d(**given, **options, backend=backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    weights = weights.to(inputs["x"].dtype).to(
        device, out.dtype
    )  # no rounding in the gradient of out
    present = {name: x for name, x in given.items() if x is not None}
    grads = torch.autograd.grad(
        (out * weights).sum(), list(present.values()), allow_unused=True, materialize_grads=True
    )
    results = {"out": out, **dict(zip(present, grads, strict=True))}
    return {name: x.cpu() for name, x in results.items()}


def assert_convolution(inputs, options, backend="cpp", device="cpu"):
    """Compare the output and all gradients with the reference in float64."""
    got = run_convolution(inputs, options, backend, device=device)
    expected = run_convolution(inputs, options, "reference", torch.float64)
    rounding = tolerances.GRAD_ROUNDING[str(inputs["x"].dtype).removeprefix("torch.")]
    for name, x in got.items():
        if x.numel():
            largest = expected[name].abs().max().clamp(min=1.0)
            error = (x.double() - expected[name]).abs().max() / largest
            assert error <= tolerances.CAUSAL_CONV + rounding, (name, float(error))


@dataclass
class Problem:
    tensors: dict[str, torch.Tensor | None]
    options: dict

    def run(self, backend=None, dtype=None, device="cpu"):
        """Return what the operator computes, and the gradients of a fixed function of it."""
        given = {}
        for name, x in self.tensors.items():
            wanted = None if x is None else dtype or x.dtype
            given[name] = None if x is None else x.detach().to(device, wanted).requires_grad_()
        options = self.options.items()
        options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options}
        out, final = linear_recurrence(**given, **options, output_final_state=True, backend=backend)
        generator, rounded = torch.Generator().manual_seed(1), self.tensors["v"].dtype
        loss = sum(  # the gradient of an output is not rounded again
            (x * torch.randn(x.shape, generator=generator).to(rounded).to(x)).sum().double()
            for x in (out, final)
        )
        inputs = [x for x in given.values() if x is not None]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        names = [name for name, x in given.items() if x is not None]
        results = {"out": out, "final": final, **dict(zip(names, grads, strict=True))}
        return {name: x.cpu() for name, x in results.items()}


def make_problem(
    lengths,
    parents=None,
    *,
    heads=(2, 2),
    dims=(8, 8),
    channels=False,
    delta=True,
    beta=True,
    initial=False,
    l2_norm=True,
    dtype=torch.float32,
    decay=(1e-4, 2.0),
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)
    tokens, segments = sum(lengths), len(lengths)
    k_heads, v_heads = heads
    k_dim, v_dim = dims

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    per_head = (tokens, v_heads, k_dim) if channels else (tokens, v_heads)
    low, high = decay
    tensors = {
        "q": normal(tokens, k_heads, k_dim).to(dtype),
        "k": normal(tokens, k_heads, k_dim).to(dtype),
        "v": normal(tokens, v_heads, v_dim).to(dtype),
        "g": -(low + (high - low) * uniform(*per_head)),
        "beta": uniform(tokens, v_heads) if beta else None,
        "initial_state": normal(segments, v_heads, k_dim, v_dim) if initial else None,
    }
    if not l2_norm:
        tensors["k"] = (tensors["k"] / tensors["k"].float().norm(dim=-1, keepdim=True)).to(dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    options = {"cu_seqlens": ends, "delta_rule": delta, "l2_norm": l2_norm}
    if parents is not None:
        options["parents"] = torch.tensor(parents, dtype=torch.int64)
    return Problem(tensors, options)


def assert_recurrence(problem, rounded=0.0, backend="cpp", device="cpu"):
    """Compare output, last states and all gradients with the reference in float64."""
    got, expected = problem.run(backend, device=device), problem.run("reference", torch.float64)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        scale = expected[name].abs().max().clamp(min=1.0) if x.numel() else 1.0
        error = (x.double() - expected[name]).abs().max() / scale if x.numel() else 0.0
        assert error <= tolerances.LINEAR_RECURRENCE + rounded, (name, float(error))


FOREST = [20, 1, 0, 2, 40, 1], [-1, 0, 1, 2, 0, -1]

# (width, bias, rows of an initial state, activation, dtype)
CONVOLUTIONS = (
    (4, True, True, "silu", torch.float32),
    (4, False, False, "silu", torch.bfloat16),
    (3, False, True, None, torch.float32),
    (2, True, True, "silu", torch.bfloat16),
)


def check_convolution(device, case):
    width, bias, initial, activation, dtype = case
    for lengths, parents in (FOREST, ([70], None), ([0, 3], [-1, 0])):
        inputs = make_convolution(lengths, 70, width, bias=bias, initial=initial, dtype=dtype)
        options = {**segments(lengths, parents), "activation": activation}
        assert_convolution(inputs, options, "triton", device)


# (a decay per channel, delta rule, l2 norm, beta, initial state, dtype, heads, channels)
RECURRENCES = (
    (False, True, True, True, True, torch.bfloat16, (1, 2), (20, 40)),
    (False, True, False, False, False, torch.float32, (2, 2), (16, 16)),
    (True, True, True, True, True, torch.float32, (1, 2), (33, 9)),
    (True, True, True, True, False, torch.bfloat16, (1, 1), (33, 33)),
    (True, False, False, True, True, torch.bfloat16, (1, 1), (5, 33)),
    (False, False, False, False, True, torch.bfloat16, (1, 3), (16, 16)),
)


def check_recurrence(device, case):
    channels, delta, l2_norm, beta, initial, dtype, heads, dims = case
    options = {"channels": channels, "delta": delta, "l2_norm": l2_norm, "beta": beta}
    options |= {"initial": initial, "dtype": dtype, "heads": heads, "dims": dims}
    rounded = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    for lengths, parents in (FOREST, ([33], None), ([0, 3], [-1, 0])):
        problem = make_problem(lengths, parents, **options)
        assert_recurrence(problem, rounded, "triton", device)
    strong = make_problem([65], decay=(19.0, 20.0), **options)
    assert_recurrence(strong, rounded, "triton", device)


def check_nan(device, op):
    """A token that is not a number spoils no other tree, nor in a convolution what is before it."""
    lengths, parents = [5, 4, 36], [-1, -1, 1]
    if op == "convolution":
        given, options = make_convolution(lengths, 20, 4), segments(lengths, parents)
        results = (run_convolution(given, options, "triton", device=device) for _ in "ab")
        token = given["x"]
    else:
        problem = make_problem(lengths, parents, channels=True)
        results = (problem.run("triton", device=device) for _ in "ab")
        token = problem.tensors["v"]
    clean = next(results)
    token[4] = float("nan")
    spoilt = next(results)
    if op == "convolution":  # a chunk of the recurrence is one product of matrices
        assert torch.equal(spoilt["out"][:4], clean["out"][:4])
    for name, x in spoilt.items():
        if len(x) == sum(lengths):
            assert torch.equal(x[5:], clean[name][5:]), name
