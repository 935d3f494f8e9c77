"""Tokens that sequences have in common are computed once in a step, with the bits of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridengine.engine.exact.steps import find_repeats
from hybridengine.engine.vllm.environment import vllm_available
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.vllm_llm import open_llm

PROMPT = [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("tails", "lengths", "blocks", "repeated"),
    [
        ([PROMPT, PROMPT, PROMPT], [6, 6, 6], [[1, 2], [3, 4], [5, 6]], [0, 0, 0]),
        # The second one found the first one's full block of 4 in the cache.
        ([PROMPT, PROMPT[4:]], [6, 6], [[1, 2], [1, 3]], [0, 0]),
        ([PROMPT, PROMPT[4:]], [6, 6], [[1, 2], [4, 3]], [0, 1]),  # other tokens before
        ([PROMPT, PROMPT[3:]], [6, 6], [[1, 2], [1, 3]], [0, 0]),
        # Chunks that begin within a block: what is in it is known to be equal in no other block.
        ([PROMPT, PROMPT], [8, 8], [[1, 2], [3, 4]], [0, 1]),
        ([PROMPT, PROMPT[1:]], [6, 5], [[1, 2], [3, 4]], [0, 1]),
        ([PROMPT, [*PROMPT[:3], 1, *PROMPT[4:]]], [6, 6], [[1, 2], [3, 4]], [0, 1]),
        ([PROMPT[4:], PROMPT], [6, 6], [[1, 2], [1, 3]], [0, 1]),  # an earlier one has too few
        ([[5], [5]], [9, 9], [[1, 2, 3], [1, 2, 4]], [0, 0]),
        ([[5], [5]], [10, 10], [[1, 2, 3], [1, 2, 4]], [0, 1]),  # decoding
        ([PROMPT, PROMPT[:3], PROMPT], [6, 3, 6], [[1, 2], [3, 0], [4, 5]], [0, 1, 0]),
    ],
)
def test_a_sequence_repeats_another_one_if_all_its_tokens_are_known_to_be_equal(
    tails: list[list[int]], lengths: list[int], blocks: list[list[int]], repeated: list[int]
) -> None:
    starts = [sum(map(len, tails[:i])) for i in range(len(tails) + 1)]
    token_ids, table = [token for tail in tails for token in tail], torch.tensor(blocks)
    assert find_repeats(token_ids, starts, lengths, [(table, 4)]) == repeated
    # All groups of layers must agree; one with blocks of 16 has all tokens in the first.
    other = torch.arange(len(blocks))[:, None]
    expected = [j if length == len(tail) else i for i, (j, length, tail) in
                enumerate(zip(repeated, lengths, tails, strict=True))]  # fmt: skip
    assert find_repeats(token_ids, starts, lengths, [(table, 4), (other, 16)]) == expected


def generate(llm: Any, n: int) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probs of n responses to each of five prompts."""
    from vllm import SamplingParams

    from hybridengine.engine.vllm.sampling import request_generators

    sampling = SamplingParams(
        n=n, seed=1, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False
    )
    # Two that fill no block of 32, one token more than a block, two blocks, an equal prompt.
    lengths = (5, 20, 33, 64, 20)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in lengths]
    with request_generators():
        requests = llm.generate(prompts, sampling, use_tqdm=False)
    outputs = [output for request in requests for output in request.outputs]
    llm.reset_prefix_cache()
    return [
        (list(o.token_ids), [next(iter(x.values())).logprob for x in o.logprobs]) for o in outputs
    ]


def compare(rank: int, world_size: int, path: str, caching: bool, budget: int) -> None:
    from hybridengine.engine.exact import operators
    from hybridengine.engine.exact.steps import compute_repeats_once
    from hybridengine.engine.vllm.sampling import FusedSampler

    llm = open_llm(
        path, "float32", exact=True, max_model_len=80, kv_cache_memory_bytes=8 << 20,
        enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=32,
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    FusedSampler(runner, exact=True)
    model, rows = runner.get_model(), list[int]()
    with patch.object(operators, "compute_repeats_once"):
        operators.use_exact_operators(model, 80)
    forward = model.forward

    def counting(input_ids: Any, positions: Any, *arguments: Any, **options: Any) -> Any:
        rows.append(len(positions))
        return forward(input_ids, positions, *arguments, **options)

    def taken() -> list[int]:
        counts = list(rows)
        rows.clear()
        return counts

    model.forward = counting
    expected, each = generate(llm, 4), taken()
    compute_repeats_once(model)
    assert generate(llm, 4) == expected
    once = taken()
    assert len(once) == len(each)
    if budget >= 5 * 4 * 64:
        # The step of all prompts computes each of the four that differ once: with the cache, a
        # longer one's blocks of 32 are those of a shorter one, but for the last block.
        assert once[0] == (5 + 20 + 33 + 32 if caching else 5 + 20 + 33 + 64)
        assert once[1:] == each[1:]
    assert sum(once) < sum(each), (once, each)
    seen: list[int] = []
    layer = next(m for name, m in model.named_modules() if name.endswith("input_layernorm"))
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    assert generate(llm, 4) == expected
    assert taken() == each  # a hook sees every token
    handle.remove()


@pytest.mark.multirank
@pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it")
@pytest.mark.parametrize(
    ("kind", "caching", "budget"),
    [
        ("llama", True, 2048),
        pytest.param("qwen3", False, 2048, marks=pytest.mark.exhaustive),
        ("mistral", True, 48),
    ],
)
def test_an_engine_computes_a_prompt_once(
    kind: str, caching: bool, budget: int, tmp_path: Path
) -> None:
    run_ranks(compare, 1, save_tiny(kind, tmp_path), caching, budget)
