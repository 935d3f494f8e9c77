"""linear_token_log_probs and linear_policy_loss against float64 two-step references."""

import pytest
import torch
import torch.distributed as dist
from hybridengine.kernels import (
    linear_policy_loss,
    linear_token_log_probs,
    policy_loss,
    token_log_probs,
)
from hybridengine.kernels._mixed_product import WIDENED_BYTES
from hybridengine.kernels.aggregation import LOSS_AGG_MODES
from hybridengine.kernels.linear_logprob import Chunks
from hybridengine.kernels.token_loss import LOSS_MODES, LossOptions
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tolerances
from tests.ranks import run_ranks

# Of gradients of 16-bit inputs, by the largest entry: the logits' gradient and the result are each
# rounded to 8 bits.
ROUNDED = {"rtol": 2**-7, "atol": 2**-8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(rows, width, vocab, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight, bias = draw(rows, width), draw(vocab, width), draw(vocab)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    return [t.to(dtype) for t in (hidden, weight, bias)], token_ids, draw(2, rows)


def gradients(function, tensors, token_ids, weights, device="cpu", dtype=None, **options):
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in tensors]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    weights = weights.to(device)
    log_probs, entropy = function(*leaves, token_ids.to(device), **options)
    loss = (log_probs * weights[0].to(log_probs)).sum()
    loss = loss + (entropy * weights[1].to(entropy)).sum()
    found = [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]
    return [t.cpu() for t in found]


def two_steps(hidden, weight, bias, token_ids, **options):
    return token_log_probs(torch.nn.functional.linear(hidden, weight, bias), token_ids, **options)


def fused(hidden, weight, bias, token_ids, **options):
    return linear_token_log_probs(hidden, weight, token_ids, bias, **options)


def assert_all_close(got, expected, **tolerance):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e.double(), **(tolerance or tolerances.LINEAR))


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(0, 50),
    width=st.integers(1, 40),
    vocab=st.integers(1, 130),
    chunk_rows=st.integers(1, 60),
    seed=st.integers(0, 100),
)
def test_against_float64(device, rows, width, vocab, chunk_rows, seed):
    tensors, token_ids, weights = problem(rows, width, vocab, seed)
    token_ids[::5] = -100
    options = {"temperature": 0.8, "softcap": 30.0}
    expected = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64, **options)
    got = gradients(
        fused, tensors, token_ids, weights, device, budget_bytes=chunk_rows * vocab * 4, **options
    )
    assert_all_close(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype, device):
    tensors, token_ids, weights = problem(64, 128, 1000, dtype=dtype)
    tensors[1] /= 128**0.5
    exact = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)
    plain = lambda *a: two_steps(*a, backend="reference")  # noqa: E731
    peer = gradients(plain, tensors, token_ids, weights, device)
    ours = gradients(fused, tensors, token_ids, weights, device, budget_bytes=20 * 1000 * 6)
    for e, p, o in zip(exact, peer, ours, strict=True):
        error, peer_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
        assert error <= tolerances.ERROR_FACTOR * peer_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_logits_of_16_bit_inputs_are_not_rounded(dtype, device):
    """As exact as from inputs widened to float32; PyTorch's own are 1000 times off."""
    tensors, token_ids, weights = problem(64, 128, 1000, dtype=dtype)
    exact = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)[:2]
    ours = gradients(fused, tensors, token_ids, weights, device, budget_bytes=20 * 1000 * 6)[:2]
    assert_all_close(ours, exact)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("backward", (False, True))
def test_buffers_keep_to_the_budget(dtype, backward):
    """By their sizes: what a machine's allocator keeps beside is measured in the benchmark."""
    for rows, width, vocab in ((512, 1024, 151_936), (4096, 1024, 49_152), (3, 8, 20), (0, 8, 20)):
        hidden, weight = (torch.empty(n, width, dtype=dtype, device="meta") for n in (rows, vocab))
        chunks = Chunks(hidden, weight, None, 2**28, False, backward)
        widths = rows and width * 8 * min(rows, chunks.size)  # packed or widened, and a gradient
        widened = 0 if dtype == torch.float32 else WIDENED_BYTES
        buffers = {id(b): b.nbytes for b in (chunks._logits, chunks.gradient)}
        assert sum(buffers.values()) + widths + widened <= 2**28
        covered = [row for part in chunks.slices() for row in range(part.start, part.stop)]
        assert covered == list(range(rows))
        if rows == 512:
            assert len(list(chunks.slices())) == 2


@pytest.mark.parametrize("frozen", ((0,), (1,), (0, 1), (1, 2)))
def test_what_is_frozen_costs_nothing(frozen, monkeypatch):
    tensors, token_ids, weights = problem(30, 8, 50)
    expected = gradients(fused, tensors, token_ids, weights)[2:]
    if 0 in frozen:
        monkeypatch.setattr(Chunks, "hidden_grad", None)
    if 1 in frozen:
        monkeypatch.setattr(Chunks, "weight_grad", None)
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    log_probs, entropy = fused(*leaves, token_ids)
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    for i, leaf in enumerate(leaves):
        if i in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, expected[i])


def test_main_grad_is_added_to():
    (hidden, weight, bias), token_ids, weights = problem(30, 8, 50)
    expected = gradients(fused, (hidden, weight, bias), token_ids, weights)[3]
    weight.requires_grad_()
    main_grad = torch.ones(50, 8)
    log_probs, entropy = fused(hidden, weight, bias, token_ids, main_grad=main_grad)
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected, **tolerances.LINEAR)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_rows_do_not_depend_on_their_surroundings(device):
    tensors, token_ids, weights = problem(300, 64, 501, dtype=torch.float32)
    whole = gradients(fused, tensors, token_ids, weights, device, deterministic=True)
    for begin, end in ((0, 1), (1, 130), (130, 300), (77, 205)):
        rows = slice(begin, end)
        part = gradients(
            fused, [tensors[0][rows], *tensors[1:]], token_ids[rows], weights[:, rows], device,
            deterministic=True, budget_bytes=10**6,
        )  # fmt: skip
        for w, p in zip(whole[:3], part[:3], strict=True):
            assert torch.equal(w[rows], p)
    again = gradients(fused, tensors, token_ids, weights, device, deterministic=True)
    assert all(torch.equal(a, w) for a, w in zip(again, whole, strict=True))


def loss_inputs(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    arguments = {
        "advantages": torch.randn(rows, generator=generator),
        "old_log_probs": -6 * torch.rand(rows, generator=generator),
        "response_mask": torch.rand(rows, generator=generator) < 0.8,
        "cu_seqlens": torch.tensor([0, rows // 4, rows // 2, rows], dtype=torch.int32),
        "selected": torch.rand(rows, generator=generator) < 0.5,
    }
    arguments["ref_log_probs"] = arguments["old_log_probs"] + 0.3
    arguments["advantages"][::3] = 0  # dead rows, where nothing else asks for a gradient
    return arguments


def loss_and_gradients(tensors, token_ids, arguments, dtype, device="cpu", **options):
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in tensors]
    arguments = {k: v.to(device) for k, v in arguments.items()}
    loss, log_probs, entropy, metrics = linear_policy_loss(
        leaves[0], leaves[1], token_ids.to(device), bias=leaves[2], **arguments, **options
    )
    found = [loss.detach(), log_probs, entropy, *torch.autograd.grad(3.0 * loss, leaves)]
    return [t.cpu() for t in found], metrics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", ("plain", "entropy and kl"))
@pytest.mark.parametrize("agg_mode", ("token-mean", "seq-mean-token-mean"))
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_policy_loss_modes_against_float64(mode, agg_mode, extra, device):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    options = {"loss_mode": mode, "loss_agg_mode": agg_mode, "temperature": 0.9}
    if extra != "plain":
        options |= {"entropy_coeff": 0.01, "kl_coef": 0.1}
    expected, expected_metrics = loss_and_gradients(
        tensors, token_ids, arguments, torch.float64, **options
    )
    got, metrics = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, budget_bytes=11 * 101 * 4, **options
    )
    assert_all_close(got, expected)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        torch.testing.assert_close(
            metrics[name].cpu().double(), value.double(), **tolerances.LINEAR
        )


def test_policy_loss_gradients_add_up_over_micro_batches():
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = {k: v for k, v in loss_inputs(40).items() if k != "cu_seqlens"}
    total = {"global_num_tokens": float(arguments["response_mask"].sum())}
    whole, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32, **total)
    parts = []
    for rows in (slice(0, 7), slice(7, 40)):
        split = {k: v[rows] for k, v in arguments.items()}
        parts.append(
            loss_and_gradients(
                [tensors[0][rows], *tensors[1:]], token_ids[rows], split, torch.float32, **total
            )[0]
        )
    joined = [parts[0][0] + parts[1][0]]
    joined += [torch.cat([a, b]) for a, b in zip(parts[0][1:4], parts[1][1:4], strict=True)]
    joined += [a + b for a, b in zip(parts[0][4:], parts[1][4:], strict=True)]
    assert_all_close(joined, whole)


def test_dead_rows_do_not_reach_the_gradient_products(monkeypatch):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    seen = []
    original = Chunks.weight_grad

    def counting(self, total, grad_logits, hidden, add):
        seen.append(grad_logits.shape[0])
        original(self, total, grad_logits, hidden, add)

    monkeypatch.setattr(Chunks, "weight_grad", counting)
    _, metrics = loss_and_gradients(tensors, token_ids, arguments, torch.float32)
    could_live = arguments["response_mask"] & (arguments["advantages"] != 0)
    assert sum(seen) <= could_live.sum()
    assert metrics["pg_clipfrac"] > 0  # clipped rows are dead as well
    assert sum(seen) < could_live.sum()


@pytest.mark.parametrize("device", DEVICES)
def test_policy_loss_of_16_bit_inputs_over_many_chunks_with_dead_rows(device):
    """Live rows of several chunks share a gradient product; what is off is the rounding."""
    tensors, token_ids, _ = problem(200, 16, 101, dtype=torch.bfloat16)
    arguments = loss_inputs(200)
    exact, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float64)
    for budget_bytes in (2 * 101 * 6, 37 * (101 * 6 + 128), 2**20):
        got, _ = loss_and_gradients(
            tensors, token_ids, arguments, torch.bfloat16, device, budget_bytes=budget_bytes
        )
        assert_all_close(got[:3], exact[:3])
        for g, e in zip(got[3:], exact[3:], strict=True):
            torch.testing.assert_close(g.double() / e.abs().max(), e / e.abs().max(), **ROUNDED)


@pytest.mark.parametrize("mode", ("ppo_clip", "gspo"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_deterministic_policy_loss_rows_do_not_depend_on_their_surroundings(dtype, mode):
    tensors, token_ids, _ = problem(300, 64, 501, dtype=dtype)
    arguments = {k: v for k, v in loss_inputs(300).items() if k not in ("cu_seqlens", "selected")}
    arguments["response_mask"][:] = True
    counts = {"global_num_tokens": 300.0, "global_num_seqs": 3.0, "loss_mode": mode}
    ends = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    options = counts | {"deterministic": True}
    whole, _ = loss_and_gradients(
        tensors, token_ids, arguments | {"cu_seqlens": ends}, dtype, **options
    )
    for begin, end in ((0, 100), (100, 300)):
        rows = slice(begin, end)
        some = {k: v[rows] for k, v in arguments.items()}
        some["cu_seqlens"] = ends[(ends >= begin) & (ends <= end)] - begin
        part, _ = loss_and_gradients(
            [tensors[0][rows], *tensors[1:]], token_ids[rows], some, dtype, budget_bytes=10**6,
            **options,
        )  # fmt: skip
        for w, p in zip(whole[1:4], part[1:4], strict=True):
            assert torch.equal(w[rows], p)
    again, _ = loss_and_gradients(
        tensors, token_ids, arguments | {"cu_seqlens": ends}, dtype, **options
    )
    assert all(torch.equal(a, w) for a, w in zip(again, whole, strict=True))


@pytest.mark.parametrize("options", ({}, {"loss_mode": "gspo"}, {"backend": "reference"}))
def test_policy_loss_adds_to_main_grad(options):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    expected, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32, **options)
    hidden, weight, bias = (t.detach().clone().requires_grad_() for t in tensors)
    main_grad = torch.ones(101, 16)
    loss, *_ = linear_policy_loss(
        hidden, weight, token_ids, bias=bias, main_grad=main_grad, **arguments, **options
    )
    assert torch.equal(main_grad, torch.ones(101, 16))  # the backward adds, not the forward
    (3.0 * loss).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected[4], **tolerances.LINEAR)
    torch.testing.assert_close(hidden.grad, expected[3], **tolerances.LINEAR)


def test_policy_loss_of_nothing():
    tensors, token_ids, _ = problem(8, 16, 101)
    arguments = loss_inputs(8) | {"response_mask": torch.zeros(8, dtype=torch.bool)}
    got, _ = loss_and_gradients(tensors, token_ids, arguments, torch.float32)
    assert all(not value.any() for value in got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_nan_in_rows_left_out_stays_there(dtype, device):
    """Their gradient of the logits is 0, and 0 * NaN must not reach that of the weight."""
    tensors, token_ids, weights = problem(30, 16, 50, dtype=dtype)
    tensors[0][[4, 9]] = torch.nan
    token_ids[4], weights[:, 9] = -100, 0.0
    log_probs, entropy, *grads = gradients(
        fused, tensors, token_ids, weights, device, budget_bytes=7 * 50 * 6
    )
    assert log_probs[4] == entropy[4] == 0
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][[4, 9]].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", ({}, {"loss_mode": "gspo"}, {"backend": "reference"}))
@pytest.mark.parametrize("extra", ({}, {"entropy_coeff": 0.01}))
def test_nan_in_masked_tokens_stays_there(extra, options, device):
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    clean, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, **options, **extra
    )
    masked = ~arguments["response_mask"]
    tensors = [t.detach() for t in tensors]
    tensors[0][masked] = torch.nan
    for name in ("advantages", "old_log_probs", "ref_log_probs"):
        arguments[name][masked] = torch.nan
    token_ids[masked] = 10**9
    got, _ = loss_and_gradients(
        tensors, token_ids, arguments, torch.float32, device, **options, **extra
    )
    assert_all_close(got, clean)


def test_wrong_arguments_are_named():
    (hidden, weight, bias), token_ids, vectors = problem(6, 8, 20)

    def both(ids=token_ids, **changed):
        inputs = {"hidden": hidden, "weight": weight, "token_ids": ids, "bias": bias, **changed}
        yield lambda: linear_token_log_probs(**inputs)
        yield lambda: linear_policy_loss(**inputs, advantages=vectors[0], old_log_probs=vectors[1])

    for changed, error, named in (
        ({"weight": weight[:, 1:]}, ValueError, r"weight \(20, 7\) .* expected \[T, H\] and"),
        ({"ids": token_ids[1:]}, ValueError, r"token_ids has shape \(5,\); expected \(6,\)"),
        ({"bias": bias[1:]}, ValueError, r"bias has shape \(19,\)"),
        ({"budget_bytes": 0}, ValueError, "budget_bytes is 0; expected"),
        ({"main_grad": weight.bfloat16()}, ValueError, r"main_grad is \(20, 8\) torch.bfloat16"),
        ({"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ({"ids": token_ids + 20}, IndexError, "outside the vocabulary of 20"),
    ):
        for call in both(**changed):
            with pytest.raises(error, match=named):
                call()


def test_two_step_form_gives_the_same_loss():
    tensors, token_ids, _ = problem(40, 16, 101)
    arguments = loss_inputs(40)
    loss, log_probs, _, _ = linear_policy_loss(
        tensors[0], tensors[1], token_ids, bias=tensors[2], **arguments
    )
    arguments = {k: v for k, v in arguments.items() if k not in ("advantages", "old_log_probs")}
    inputs = loss_inputs(40)
    again, _ = policy_loss(log_probs, inputs["old_log_probs"], inputs["advantages"], **arguments)
    assert torch.equal(loss, again)


def test_op_contracts():
    (hidden, weight, bias), token_ids, _ = problem(6, 8, 20)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    torch.library.opcheck(
        torch.ops.hybridengine.linear_token_log_probs.default,
        (*leaves, token_ids, 1.0, None, 1.0, 0.0, -100, None, "", 2**20, False, None, None),
    )


@pytest.mark.parametrize("wide_weight_grad", (False, True))
def test_policy_gradient_op_contract(wide_weight_grad):
    (hidden, weight, bias), token_ids, vectors = problem(6, 8, 20, dtype=torch.bfloat16)
    mask, weights = torch.ones(6, dtype=torch.bool), torch.full((6,), 1 / 6)
    numbers = [*map(float, LossOptions()), 0.0, 0.01, 1.0]
    torch.library.opcheck(
        torch.ops.hybridengine.linear_policy_gradient.default,
        (hidden, weight, bias, token_ids, 1.0, None, 1.0, 0.0, -100, None, "", 2**20, False,
         vectors[0], vectors[1], mask, None, None, None, weights,
         [0, LOSS_AGG_MODES.index("token-sum"), 0, False, True, True], numbers, True,
         wide_weight_grad, [True, True, True], "cpp"),
    )  # fmt: skip


def test_compiles_as_one_graph():
    (hidden, weight, _), token_ids, weights = problem(6, 8, 20)

    def step(h, w):
        log_probs, entropy = linear_token_log_probs(h, w, token_ids)
        loss = linear_policy_loss(h, w, token_ids, weights[0], weights[1])[0]
        return (log_probs + entropy).sum() + loss

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    assert_all_close(results[1], results[0])


def _vocabulary_parallel(rank, size):
    tensors, token_ids, weights = problem(23, 8, 60)
    token_ids[4] = -100
    part = slice(rank * 60 // size, (rank + 1) * 60 // size)
    mine = [tensors[0], tensors[1][part], tensors[2][part]]
    group = dist.group.WORLD
    keep = torch.rand(23, 60, generator=torch.Generator().manual_seed(1)) < 0.7
    from_logits = gradients(
        two_steps, mine, token_ids, weights, group=group, temperature=0.7,
        keep_mask=keep[:, part].contiguous(),
    )  # fmt: skip
    linear = gradients(fused, mine, token_ids, weights, group=group, budget_bytes=5 * 4 * 30)
    reference = gradients(two_steps, mine, token_ids, weights, group=group, backend="reference")
    loss, _ = loss_and_gradients(mine, token_ids, loss_inputs(23), torch.float32, group=group)
    return from_logits, linear, reference, loss


@pytest.mark.multirank
@pytest.mark.parametrize("size", (2, 3))
def test_vocabulary_parallel_equals_one_rank(size):
    tensors, token_ids, weights = problem(23, 8, 60)
    token_ids[4] = -100
    keep = torch.rand(23, 60, generator=torch.Generator().manual_seed(1)) < 0.7
    results = run_ranks(_vocabulary_parallel, size)
    options = {"temperature": 0.7, "keep_mask": keep}
    masked = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64, **options)
    plain = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)
    loss, _ = loss_and_gradients(tensors, token_ids, loss_inputs(23), torch.float64)
    for rank, (from_logits, linear, reference, loss_found) in enumerate(results):
        part = slice(rank * 60 // size, (rank + 1) * 60 // size)
        for found, expected in ((from_logits, masked), (linear, plain), (reference, plain)):
            assert_all_close(found[:2], expected[:2])
            assert_all_close(found[3:], [e[part] for e in expected[3:]])
        assert_all_close(linear[2:3], plain[2:3])  # summed over the ranks
        assert_all_close(loss_found[:4], loss[:4])
        assert_all_close(loss_found[4:], [e[part] for e in loss[4:]])
    for other in results[1:]:  # the same bits on every rank
        assert all(torch.equal(a, b) for a, b in zip(results[0][1][:2], other[1][:2], strict=True))
