"""token_log_probs, linear_token_log_probs and linear_policy_loss take the same arguments."""

import inspect
import math

import pytest
import torch

from hybridengine.kernels import linear_policy_loss, linear_token_log_probs, token_log_probs
from hybridengine.kernels._backend import native
from hybridengine.kernels.logprob.options import row_options
from tests import tolerances

NAN, INF = math.nan, math.inf
ROWS, WIDTH, VOCAB = 6, 4, 11


def problem(shape=(ROWS,)):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*shape, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    token_ids = torch.randint(0, VOCAB, shape, generator=generator)
    return hidden, weight, token_ids


def from_logits(hidden, weight, token_ids, *args, **options):
    return token_log_probs(hidden @ weight.T, token_ids, *args, **options)


def from_loss(hidden, weight, token_ids, *args, **options):
    """The log-probs and entropy that linear_policy_loss returns."""
    given = {
        "old_log_probs": torch.zeros(token_ids.shape),
        "advantages": torch.ones(token_ids.shape),
        **options,
    }
    return linear_policy_loss(hidden, weight, token_ids, *args, **given)[1:3]


ALL = pytest.mark.parametrize("function", (from_logits, linear_token_log_probs, from_loss))
BACKENDS = pytest.mark.parametrize("backend", (None, "reference"))


def test_temperature_follows_the_token_ids_everywhere():
    for function in (token_log_probs, linear_token_log_probs, linear_policy_loss):
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert names[-2:] == ["token_ids", "temperature"]


@ALL
@BACKENDS
def test_batches_and_int32_ids(function, backend):
    hidden, weight, token_ids = problem((2, 3))
    temperature = torch.rand(2, 3) + 0.5
    vocab_mask = torch.rand(2, 3, VOCAB, generator=torch.Generator().manual_seed(0)) < 0.7
    expected = function(
        hidden.view(6, WIDTH),
        weight,
        token_ids.view(6),
        temperature.view(6),
        vocab_mask=vocab_mask.view(6, VOCAB),
        backend=backend,
    )
    for mask in (vocab_mask, vocab_mask.int(), vocab_mask.float()):
        results = function(
            hidden, weight, token_ids.int(), temperature, vocab_mask=mask, backend=backend
        )
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want.view(2, 3))


def test_the_extension_compares_devices_too():
    logits, token_ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for changed in ({"temperatures": torch.ones(2)}, {"vocab_mask": torch.ones(2, 3).bool()}):
        options = row_options("test", token_ids, 3)
        options = options._replace(**{name: t.to("meta") for name, t in changed.items()})
        with pytest.raises(ValueError, match="is on meta, logits on cpu; move them"):
            native().log_prob_forward(logits, token_ids, options.native(), False, None, None)
    options = row_options("test", token_ids, 3).native()
    with pytest.raises(ValueError, match="token_ids is on meta, logits on cpu"):
        native().log_prob_forward(logits, token_ids.to("meta"), options, False, None, None)
    with pytest.raises(ValueError, match="bad_label is on meta, logits on cpu"):
        native().log_prob_forward(
            logits, token_ids, options, False, torch.zeros(1).to("meta"), None
        )
    results = native().log_prob_forward(logits, token_ids, options, False, None, None)
    for index in range(3):
        given = [r.to("meta") if i == index else r for i, r in enumerate(results)]
        with pytest.raises(ValueError, match="is on meta, logits on cpu"):
            native().log_prob_backward(
                logits, token_ids, options, given, None, None, torch.empty(2, 3), None, None
            )
    with pytest.raises(ValueError, match="grad_logits is on meta, logits on cpu"):
        out = torch.empty(2, 3, device="meta")
        native().log_prob_backward(logits, token_ids, options, results, None, None, out, None, None)


@ALL
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"temperature": "1"}, TypeError, "temperature is '1' .str.; expected a number"),
        ({"temperature": torch.tensor([1, 1, 0, 1, 1, 1.0])}, ValueError, r"ature\[2\] is 0.0"),
        ({"temperature": torch.tensor([1, 1, NAN, 1, 1, 1])}, ValueError, r"ature\[2\] is nan"),
        ({"temperature": torch.ones(ROWS, requires_grad=True)}, ValueError, "detach it"),
    ],
)
def test_a_wrong_argument_is_named(function, changed, error, message):
    hidden, weight, token_ids = problem()
    with pytest.raises(error, match=message):
        function(hidden, weight, **{"token_ids": token_ids, **changed})


@ALL
def test_a_bad_temperature_of_an_ignored_token_does_not_matter(function):
    hidden, weight, token_ids = problem()
    token_ids[2] = -100
    temperature = torch.tensor([1, 1, 0, 1, 1, 1.0])
    log_probs, entropy = function(hidden, weight, token_ids, temperature)
    assert log_probs.isfinite().all()
    assert log_probs[2] == entropy[2] == 0


def test_in_place_gradients_move_the_version_of_the_logits():
    hidden, weight, token_ids = problem()
    leaf = hidden.requires_grad_()
    logits = leaf @ weight.T
    other = logits.square().sum()  # keeps the logits for its own backward
    log_probs, _ = token_log_probs(logits, token_ids, inplace_backward=True)
    before = logits._version
    (used,) = torch.autograd.grad(log_probs.sum(), logits)
    assert used.data_ptr() == logits.data_ptr()
    assert logits._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_rows_that_share_memory_are_not_written_in_place():
    _, _, token_ids = problem()
    one = torch.randn(1, VOCAB)
    results = []
    for inplace in (False, True):
        row = one.clone().requires_grad_()
        log_probs, _ = token_log_probs(row.expand(ROWS, VOCAB), token_ids, inplace_backward=inplace)
        results.append(torch.autograd.grad(log_probs.sum(), row)[0])
    assert torch.equal(results[1], results[0])
    assert torch.equal(row, one)


@BACKENDS
@pytest.mark.parametrize("loss_agg_mode", ("token-mean", "seq-mean-token-mean"))
def test_ignored_labels_are_outside_the_loss(loss_agg_mode, backend):
    """pack(shifted=) labels the last token of a sequence -100: it is not in the loss."""
    hidden, weight, token_ids = problem()
    token_ids[[2, 5]] = -100
    old, advantages = torch.full((ROWS,), -2.0), torch.arange(1.0, ROWS + 1)
    results = []
    for labelled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        inside = token_ids != -100
        if labelled:  # masked, with ordinary labels
            given = {"token_ids": token_ids.where(inside, 3), "response_mask": inside}
        else:
            given = {"token_ids": token_ids}
            old, advantages = old.where(inside, NAN), advantages.where(inside, NAN)
            leaves[0] = hidden.where(inside[:, None], NAN).requires_grad_()
        loss, log_probs, entropy, metrics = linear_policy_loss(
            *leaves,
            **given,
            old_log_probs=old,
            advantages=advantages,
            backend=backend,
            cu_seqlens=torch.tensor([0, 3, 6]),
            loss_agg_mode=loss_agg_mode,
            entropy_coeff=0.1,
        )
        grads = torch.autograd.grad(loss, leaves)
        results.append([loss, log_probs, entropy, *metrics.values(), *grads])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@BACKENDS
def test_padded_rows_have_the_loss_of_packed_sequences(backend):
    hidden, weight, token_ids = problem((2, 3))
    old, advantages = torch.randn(2, 3) - 2, torch.randn(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    results = []
    for view in ((2, 3), (6,)):
        given = {"old_log_probs": old, "advantages": advantages, "response_mask": mask}
        given = {name: tensor.view(view) for name, tensor in given.items()}
        leaf = hidden.clone().requires_grad_()
        loss, *others, _ = linear_policy_loss(
            leaf if len(view) == 2 else leaf.view(6, WIDTH),
            weight,
            token_ids.view(view),
            **given,
            cu_seqlens=None if len(view) == 2 else torch.tensor([0, 3, 6], dtype=torch.int32),
            loss_agg_mode="seq-mean-token-mean",
            loss_mode="gspo",
            backend=backend,
        )
        assert others[0].shape == others[1].shape == view
        results.append([loss, *(o.flatten() for o in others), torch.autograd.grad(loss, leaf)[0]])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **tolerances.LINEAR)


@pytest.mark.parametrize("op", ["token_log_probs", "linear_token_log_probs"])
def test_results_of_packed_tokens_are_not_views(op: str) -> None:
    """FSDP2 warns at every forward of a module that returns a view."""
    hidden, ids = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 3, 1])
    if op == "token_log_probs":
        results = token_log_probs(hidden, ids)
    else:
        results = linear_token_log_probs(hidden, torch.randn(4, 8), ids)
    assert not any(result._is_view() for result in results)


def test_a_dtype_is_named_once():
    hidden, weight, token_ids = problem()
    with pytest.raises(ValueError, match=r"bias has dtype int64; expected float32: convert"):
        linear_token_log_probs(hidden, weight, token_ids, bias=torch.zeros(VOCAB).long())
