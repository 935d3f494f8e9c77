"""What a server generates and which weights it has, against the trained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridengine.engine.interface import SamplingSpec, derive_seed
from hybridengine.kernels import sample_tokens
from hybridengine.remote.servers import ServerEngine, VllmServer
from hybridengine.run.config import load_config
from hybridengine.run.errors import RolloutError
from hybridengine.train.rollout_source import WeightsChecksum

__all__ = ["check_checksum", "check_generation", "scaled"]


def scaled(model: Any, factor: float) -> Any:
    for parameter in model.parameters():
        parameter.data *= factor
    return model


def drawn(logits: torch.Tensor, seed: int) -> list[int]:
    """Return the tokens of a request with this seed at temperature 0.7."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.cat([torch.randint(0, 2**31, (1,), generator=generator) for _ in logits])
    positions = torch.zeros_like(seeds)
    return sample_tokens(logits, seeds, positions, temperature=0.7).tokens.tolist()


def check_checksum(server: VllmServer, engine: ServerEngine) -> None:
    """A bit of a server's weights changes and changes back."""
    config = load_config(None, ["model.path=m", "data.train_files=f"])
    checksum = WeightsChecksum(config, engine, engine.pool.weights)
    checksum.after_sync()
    assert checksum() == {2: server.weights().checksum}
    server.request("POST", "/collective_rpc", {"method": "flip_bit"})
    with pytest.raises(RolloutError, match=f"weights of server {server.url} have changed since"):
        checksum()
    server.request("POST", "/collective_rpc", {"method": "flip_bit"})
    assert checksum() == {2: server.weights().checksum}


def check_generation(engine: ServerEngine, model: str, factor: float) -> None:
    """Compare sampled tokens' log-probs, and greedy tokens, with the trained model's."""
    from transformers import AutoModelForCausalLM

    trained = scaled(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), factor)
    prompts = [[5, 9, 33, 2], [7] * 20, [64, 3]]
    sampled = engine.generate(prompts, SamplingSpec(n=3, temperature=0.7, max_tokens=6), seed=5)
    again = engine.generate(prompts, SamplingSpec(n=3, temperature=0.7, max_tokens=6), seed=5)
    greedy = engine.generate(prompts, SamplingSpec(temperature=0.0, max_tokens=6), seed=5)
    assert [[c.token_ids for c in part] for part in sampled] == [
        [c.token_ids for c in part] for part in again
    ]
    assert len({tuple(c.token_ids) for part in sampled for c in part}) == 9
    for prompt, of_prompt, [best] in zip(prompts, sampled, greedy, strict=True):
        for index, completion in enumerate((*of_prompt, best)):
            ids = completion.token_ids
            logits = trained(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            temperature = 1.0 if completion is best else 0.7
            if completion is not best:  # the server's sampler is ours
                assert ids == drawn(logits, derive_seed(5, prompts.index(prompt)) + index)
            log_probs = (logits.double() / temperature).log_softmax(-1)
            if completion is best:
                assert ids == logits.argmax(-1).tolist()
            else:
                wanted = log_probs[torch.arange(len(ids)), ids]
                torch.testing.assert_close(
                    torch.tensor(completion.log_probs).double(), wanted, atol=2e-5, rtol=0
                )
