"""linear_recurrence: packed segments and forests, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import linear_recurrence
from tests import tolerances
from tests.kernels.linear_attention_cases import (
    DTYPES,
    Problem,
    assert_recurrence,
    make_problem,
)
from tests.kernels.strategies import integers

FOREST = ([70, 5, 0, 130, 1, 66, 40], [-1, 0, 0, 0, 2, 3, -1])


@pytest.mark.parametrize("channels", (False, True))
@pytest.mark.parametrize("delta", (False, True))
def test_a_forest_against_float64(channels, delta):
    lengths, parents = FOREST
    problem = make_problem(
        lengths, parents, heads=(2, 4), dims=(20, 40), channels=channels, delta=delta, initial=True
    )
    assert_recurrence(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=12)
@given(
    **integers(
        k_heads=(1, 2), shared=(1, 3), k_dim=(1, 40), v_dim=(1, 70), segments=(0, 5), seed=(0, 999)
    ),
    channels=st.booleans(),
    delta=st.booleans(),
    beta=st.booleans(),
    initial=st.booleans(),
    l2_norm=st.booleans(),
    data=st.data(),
)
def test_random_forests_against_float64(
    dtype,
    k_heads,
    shared,
    k_dim,
    v_dim,
    segments,
    seed,
    channels,
    delta,
    beta,
    initial,
    l2_norm,
    data,
):
    lengths = [data.draw(st.sampled_from((0, 1, 3, 17, 63, 64, 65))) for _ in range(segments)]
    parents = [data.draw(st.integers(-1, index - 1)) for index in range(segments)]
    problem = make_problem(
        lengths,
        parents,
        heads=(k_heads, k_heads * shared),
        dims=(k_dim, v_dim),
        channels=channels,
        delta=delta,
        beta=beta,
        initial=initial,
        l2_norm=l2_norm,
        dtype=dtype,
        seed=seed,
    )
    assert_recurrence(problem, tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")])


@pytest.mark.parametrize("decay", ((0.0, 0.0), (1e-4, 1e-3), (19.0, 20.0)))
@pytest.mark.parametrize("lengths", ([63], [64], [65], [300, 1]))
def test_decays_and_lengths_at_borders(decay, lengths):
    assert_recurrence(make_problem(lengths, decay=decay, dims=(16, 16)))


@pytest.mark.parametrize("value", (0.0, 1.0))
def test_beta_at_its_borders(value):
    problem = make_problem([100], dims=(16, 16))
    problem.tensors["beta"].fill_(value)
    assert_recurrence(problem)


def flattened(problem, threads=1):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return problem.run("cpp")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("channels", (False, True))
def test_the_bits_of_a_tree_depend_on_itself_alone(channels):
    """Not on other trees, on threads, or on where a sequence is split into segments."""
    options = {"heads": (1, 2), "dims": (20, 150), "channels": channels}
    problem = make_problem([70, 5, 130], [-1, 0, -1], **options)
    together = flattened(problem)
    for threads in (2, 3, 16):
        for name, x in flattened(problem, threads).items():
            assert torch.equal(x, together[name]), name
    alone = Problem(
        {name: None if x is None else x[75:] for name, x in problem.tensors.items()},
        {**problem.options, "cu_seqlens": torch.tensor([0, 130]), "parents": None},
    )
    split = Problem(
        problem.tensors,
        {
            **problem.options,
            "cu_seqlens": torch.tensor([0, 70, 75, 75 + 1, 75 + 65, 205]),
            "parents": torch.tensor([-1, 0, -1, 2, 3]),
        },
    )
    out = linear_recurrence(**alone.tensors, **alone.options)[0]
    assert torch.equal(out, together["out"][75:])
    out = linear_recurrence(**split.tensors, **split.options)[0]
    assert torch.equal(out, together["out"])


def test_a_group_has_the_bits_of_each_response_after_its_own_copy_of_the_prompt():
    problem = make_problem([90, 7, 66], [-1, 0, 0], dims=(16, 24))
    shared = linear_recurrence(**problem.tensors, **problem.options)[0]
    for begin, end in ((90, 97), (97, 163)):
        rows = torch.cat([torch.arange(90), torch.arange(begin, end)])
        alone = {name: None if x is None else x[rows] for name, x in problem.tensors.items()}
        out, _ = linear_recurrence(**alone, cu_seqlens=torch.tensor([0, len(rows)]), l2_norm=True)
        assert torch.equal(out[90:], shared[begin:end])


def test_decoding_by_states_has_the_bits_of_one_call():
    problem = make_problem([75], dims=(16, 24))
    full, last = linear_recurrence(**problem.tensors, **problem.options, output_final_state=True)
    state = None
    for t in range(75):
        token = {name: None if x is None else x[t : t + 1] for name, x in problem.tensors.items()}
        token["initial_state"] = state
        one = torch.tensor([0, 1])
        out, state = linear_recurrence(
            **token, cu_seqlens=one, l2_norm=True, output_final_state=True
        )
        assert torch.equal(out[0], full[t])
    assert torch.equal(state, last)


@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta", "initial_state"))
def test_nan_stays_in_its_tree(name):
    problem = make_problem([40, 30, 50], [-1, -1, 1], initial=True)
    clean = problem.run("cpp")
    index = 0 if name == "initial_state" else 20
    problem.tensors[name][index].fill_(float("nan"))
    for key, x in problem.run("cpp").items():
        first = 1 if key in ("final", "initial_state") else 40
        assert torch.equal(x[first:], clean[key][first:]), key


def test_strided_inputs():
    problem = make_problem([30, 40], dims=(16, 16), heads=(2, 2))
    expected = problem.run("cpp")
    joined = torch.cat([problem.tensors[name] for name in "qkv"], 1)
    problem.tensors.update(zip("qkv", joined.split(2, 1), strict=True))
    for name, x in problem.run("cpp").items():
        assert torch.equal(x, expected[name])
    problem.tensors["v"] = problem.tensors["v"].transpose(1, 2).contiguous().transpose(1, 2)
    for name, x in problem.run("cpp").items():
        assert torch.equal(x, expected[name])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parents": torch.tensor([-1, 1])}, r"parents\[1\] is 1; expected an earlier segment"),
        ({"k": torch.zeros(8, 2, 8).bfloat16()}, "k has dtype bfloat16"),
        ({"v": torch.zeros(8, 3, 8)}, "multiple"),
        ({"q": None}, "q is None"),
    ],
)
def test_wrong_arguments(change, message):
    problem = make_problem([3, 5], heads=(2, 2))
    with pytest.raises((ValueError, TypeError), match=message):
        linear_recurrence(**{**problem.tensors, **problem.options, **change})


@pytest.mark.exhaustive
def test_a_sequence_of_65536_tokens():
    problem = make_problem([65_536], heads=(1, 1), dims=(16, 16), dtype=torch.bfloat16)
    assert_recurrence(problem, 2.0**-8)
