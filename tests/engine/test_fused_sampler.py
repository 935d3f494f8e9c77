"""`FusedSampler`: vLLM's own sampler on a CPU is the reference for everything but the draw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.sampler import Sampler

from benchmarks.sampling import sampling_metadata
from hybridengine.engine.vllm.sampling import FusedSampler, draw_seeds

VOCAB = 700


def metadata(
    temperature: list[float],
    top_k: list[int],
    top_p: list[float],
    min_p: list[float] | None = None,
    **options: Any,
) -> Any:
    """Of requests with generators of their own, but for the greedy ones."""
    limits = {"top_k": torch.tensor(top_k, dtype=torch.int32), "top_p": torch.tensor(top_p)}
    if min_p is not None:
        config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
        processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
        requests = zip(temperature, min_p, strict=True)  # vLLM clears min-p of greedy ones
        params = [SamplingParams(temperature=t, min_p=p) for t, p in requests]
        added = [(i, of_row, None, []) for i, of_row in enumerate(params)]
        processor.update_state(BatchUpdate(len(min_p), removed=[], added=added, moved=[]))
        options["logitsprocs"] = LogitsProcessors([processor])
    return sampling_metadata(torch.tensor(temperature), **limits, **options)


def fused(exact: bool = False, is_covered: bool = False) -> tuple[FusedSampler, Sampler]:
    """The fused sampler, and vLLM's own; is_covered: the fused one leaves nothing to vLLM's."""
    runner = SimpleNamespace(sampler=Sampler(logprobs_mode="processed_logprobs"))
    if is_covered:
        runner.sampler.forward = None
    sampler = FusedSampler(runner, exact)
    assert FusedSampler.of(runner) is sampler
    return sampler, Sampler(logprobs_mode="processed_logprobs")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        ([1.0, 0.7, 1.3], [VOCAB] * 3, [1.0] * 3, None),
        ([0.0, 0.7, 1.0, 0.0], [VOCAB, 5, 40, VOCAB], [1.0, 1.0, 0.8, 1.0], None),
        ([0.0, 0.0], [VOCAB] * 2, [1.0] * 2, None),
        (
            [0.7, 1.0, 1.3, 1.0],
            [VOCAB, 9, 40, VOCAB],
            [1.0, 1.0, 0.8, 1.0],
            [0.05, 0.02, 0.03, 0.0],
        ),
        ([0.0, 1.0], [VOCAB] * 2, [1.0] * 2, [0.1, 0.1]),
    ],
    ids=["random", "mixed", "greedy", "min-p", "greedy min-p"],
)
def test_tokens_have_vllms_distribution(
    temperature: list[float],
    top_k: list[int],
    top_p: list[float],
    min_p: list[float] | None,
    exact: bool,
) -> None:
    sampler, own = fused(exact, is_covered=True)
    sampler.records = True
    logits = torch.randn(len(temperature), VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    given = metadata(temperature, top_k, top_p, min_p)
    output = sampler.forward(logits.clone(), given)
    tokens = output.sampled_token_ids.squeeze(1).long()
    greedy, log_probs = own.sample(logits.clone(), given)
    is_greedy = torch.tensor(temperature) == 0
    assert torch.equal(tokens[is_greedy], greedy[is_greedy])
    expected = log_probs.gather(1, tokens[:, None])
    torch.testing.assert_close(output.logprobs_tensors.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.logprobs_tensors.logprob_token_ids.squeeze(1).long(), tokens)
    for row, processed in enumerate(log_probs):
        [ids] = sampler.masks.slice_request(row, 1).to_nested_list()
        finite = (processed > -torch.inf).nonzero().flatten().tolist()
        assert ids == (finite if len(finite) < VOCAB else [])


def test_a_row_has_its_own_numbers_whatever_the_batch() -> None:
    sampler, _ = fused()
    logits = torch.zeros(4, VOCAB)
    together = sampler.forward(logits.clone(), metadata([1.0] * 4, [VOCAB] * 4, [1.0] * 4))
    alone = metadata([1.0], [VOCAB], [1.0], generators={0: torch.Generator().manual_seed(2)})
    token = sampler.forward(logits[:1].clone(), alone).sampled_token_ids
    assert torch.equal(token[0], together.sampled_token_ids[2])
    assert len(set(together.sampled_token_ids.flatten().tolist())) > 1


def test_entries_that_are_not_allowed_are_never_drawn() -> None:
    sampler, _ = fused()
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 100.0
    banned = torch.zeros(1, VOCAB, dtype=torch.bool)
    banned[0, 5] = True
    limited = metadata([1.0], [VOCAB], [1.0], allowed_token_ids_mask=banned)
    assert sampler.forward(logits, limited).sampled_token_ids.item() != 5


def test_further_log_probs_are_vllms() -> None:
    sampler, own = fused()
    logits = torch.randn(2, VOCAB)
    given = metadata([0.0] * 2, [VOCAB] * 2, [1.0] * 2, logprob_token_ids={0: [1, 2], 1: [3]})
    theirs = own(logits.clone(), given).logprobs_tensors
    ours = sampler.forward(logits.clone(), given).logprobs_tensors
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("exact", [False, True])
def test_the_most_likely_entries_are_vllms(exact: bool) -> None:
    """Of greedy rows, at temperatures, and where top-k and top-p cut within and beyond the five."""
    sampler, own = fused(exact, is_covered=True)
    rows = ([0.0, 0.7, 1.3, 1.0, 1.0], [VOCAB, VOCAB, 3, 9, VOCAB], [1.0, 1.0, 1.0, 0.9, 0.05])
    given = metadata(*rows, max_num_logprobs=5)
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    ours = sampler.forward(logits.clone(), given).logprobs_tensors
    _, processed = own.sample(logits.clone(), given)
    values, ids = processed.topk(5)
    torch.testing.assert_close(ours.logprobs[:, 1:], values, rtol=1e-5, atol=1e-5)
    kept = values > -torch.inf
    assert torch.equal(ours.logprob_token_ids[:, 1:][kept].long(), ids[kept])
    assert kept.sum(1).tolist()[:3] == [5, 5, 3] and kept[4].sum() < 5
    drawn = processed.gather(1, ours.logprob_token_ids[:, :1].long())
    torch.testing.assert_close(ours.logprobs[:, :1], drawn, rtol=1e-5, atol=1e-5)


class Names(TorchDispatchMode):
    """The names of the torch operators that write something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in ("empty", "slice"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [3, 5], ids=["of every row", "of some rows"])
def test_seeds_are_those_of_the_generators_in_a_launch_each(rows: int) -> None:
    generators = {row: torch.Generator().manual_seed(row) for row in (2, 0, 1)}
    twins = {row: torch.Generator().manual_seed(row) for row in generators}
    for _ in range(2):
        torch.manual_seed(7)
        logits = torch.zeros(rows, VOCAB)
        with Names() as seen:
            seeds = draw_seeds(generators, logits)
        assert seen.names == ["random_"] * (3 if rows == 3 else 4)
        torch.manual_seed(7)
        expected = torch.randint(0, 2**31, (rows,))
        for row, generator in twins.items():
            expected[row] = torch.randint(0, 2**31, (), generator=generator)
        assert seeds.tolist() == expected.tolist()
