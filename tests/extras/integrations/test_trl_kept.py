"""TRL's trainers over the entries that sampling kept (skipped where TRL is not installed)."""

from __future__ import annotations

import functools
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridengine.integrations import trl as adapter
from hybridengine.integrations.trl import kept, loss
from hybridengine.model import KeptIds
from tests.extras.integrations.trl_trainer import SMALL
from tests.ranks import message_of, run_ranks
from tests.tiny_models import VOCAB, save_tiny

pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")

TEMPERATURE = 0.7
NONE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
TRUNCATIONS = [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.3}]
PROMPTS = [{"prompt": f"w{i} w{i + 3} w9"} for i in (5, 5, 21, 21)]
OPTIONS = SMALL | {
    "num_generations": 2,
    "temperature": TEMPERATURE,
    "learning_rate": 1e-2,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 64,
}


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def trainer_of(name: str, model: Any, folder: str, llm: Any = None, **options: Any) -> Any:
    """A trainer of TRL with our parts, and an eager engine, or the one of another trainer."""
    from hybridengine.engine.vllm.environment import prepare_environment, unique_shared_memory

    prepare_environment()
    import trl
    from datasets import Dataset
    from trl.generation import vllm_generation

    settings = {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}
    engine = functools.partial(vllm_generation.LLM, **settings) if llm is None else lambda **_: llm
    adapter.patch()
    with unique_shared_memory(), patch.object(vllm_generation, "LLM", engine):
        return getattr(trl, f"{name}Trainer")(
            model,
            distinct,
            getattr(trl, f"{name}Config")(output_dir=folder, **OPTIONS | options),
            train_dataset=Dataset.from_list(PROMPTS * 4),
            processing_class=AutoTokenizer.from_pretrained(model.name_or_path, padding_side="left"),
        )


def log_probs_of(model: Any, batch: dict[str, Any], masks: Any = None) -> torch.Tensor:
    """Log-probs of the completions in float64, over the entries `masks` [N, V] if given."""
    ids, mask = (
        torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask")
    )
    is_token = batch["completion_mask"].bool()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -is_token.shape[1] - 1 : -1]
    logits = (logits / TEMPERATURE)[is_token]
    if masks is not None:
        logits = logits.masked_fill(~masks, -torch.inf)
    return logits.log_softmax(-1).gather(1, batch["completion_ids"][is_token][:, None])[:, 0]


def masks_of(batch: dict[str, Any]) -> torch.Tensor:
    return torch.cat([x.vocab_mask(VOCAB) for x in batch["kept_ids"]])


def differences(trainer: Any, path: str) -> dict[str, Any]:
    """How far TRL's old log-probs are from the engine's and from float64, by truncation."""
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = {}
    for cut in ({}, *TRUNCATIONS):
        for name, value in (NONE | cut).items():
            setattr(trainer.vllm_generation, name, value)
        batch = trainer._generate_and_score_completions(PROMPTS)
        is_token = batch["completion_mask"].bool()
        engine, old, reference = (
            batch[x][is_token]
            for x in ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps")
        )
        with torch.no_grad():
            full = log_probs_of(exact, batch)
            wanted = log_probs_of(exact, batch, masks_of(batch)) if cut else full
        found[str(cut)] = {
            "engine": (old - engine).abs().max().item(),
            "reference": (reference - old).abs().max().item(),  # the same weights
            "float64": (old - wanted).abs().max().item(),
            "full": (full - engine).abs().max().item(),
            "column": "kept_ids" in batch,
            "ratio": (batch["importance_sampling_ratio"] - 1).abs().max().item(),
        }
    return found


def gradient_errors(trainer: Any, path: str) -> list[float]:
    """The gradients of TRL's loss over kept entries against float64, largest relative error.

    One of TRL's loss from log-probs, then one of the group "loss".
    """
    trainer.vllm_generation.top_k, trainer.current_gradient_accumulation_steps = 5, 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions(PROMPTS)
    is_token, errors = batch["completion_mask"].bool(), []
    batch["advantages"] = torch.linspace(-1, 1, is_token.numel()).view(is_token.shape)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    log_probs = log_probs_of(exact, batch, masks_of(batch))
    # The policy, the engine's and the reference are one here: ratios are 1, and the KL is 0.
    weights = batch["advantages"] * batch["importance_sampling_ratio"]
    (-(log_probs * weights[is_token].double()).sum() / is_token.sum()).backward()
    wanted = dict(exact.named_parameters())
    for group in ("kept", "loss"):
        trainer.model.zero_grad()
        with adapter.patched(group):
            trainer.compute_loss(trainer.model, batch).backward()
        worst = [
            (p.grad - wanted[n].grad).abs().max() / wanted[n].grad.abs().max()
            for n, p in trainer.model.named_parameters()
        ]
        errors.append(max(worst).item())
    assert not hasattr(trainer, loss.WARNED), "the loss of the second gradient is ours"
    return errors


def rloo_error(model: Any, path: str, folder: str, llm: Any) -> float:
    """How far RLOO's old log-probs are from float64, of a model that computes packed rows."""
    trainer = trainer_of("RLOO", model, folder, llm, top_p=0.8)
    batch = trainer._generate_and_score_completions(PROMPTS)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        wanted = log_probs_of(exact, batch, masks_of(batch))
    trainer.train()
    of_completion = wanted.split(batch["completion_mask"].sum(1).tolist())
    error = batch["old_logps"] - torch.stack([x.sum() for x in of_completion])
    return error.abs().max().item()


def types_of_turns(trainer: Any) -> set[type]:
    """The types of the ids that vLLM gets of a prompt with tokens of an earlier turn."""
    generation, prompt = trainer.vllm_generation, [5, token(7, 7, 8)]
    with patch.object(generation.llm, "generate", wraps=generation.llm.generate) as generate:
        kept.score_completions(lambda: {"ids": generation.generate([prompt], None, 1)})
    [prompts], _ = generate.call_args
    return {type(i) for x in prompts for i in x["prompt_token_ids"]}


def trained(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = trainer_of("GRPO", model, folder, loss_type="bnpo")
    found = {
        "differences": differences(trainer, path),
        "gradients": gradient_errors(trainer, path),
    }
    found["types"] = types_of_turns(trainer)
    trainer.vllm_generation.top_p = 0.8
    trainer.train()  # weights change between two generations
    name = "sampling/sampling_logp_difference/max"
    found["trained"] = [log[name] for log in trainer.state.log_history if name in log]
    packed = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="hybridengine_varlen"
    )
    found["rloo"] = rloo_error(packed, path, folder, trainer.vllm_generation.llm)
    return found


@pytest.mark.multirank
def test_trainers_learn_from_what_sampling_kept(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    path = save_tiny("llama", tmp_path / "model")
    [found] = run_ranks(trained, 1, path, str(tmp_path), timeout_s=300)
    plain = found["differences"].pop("{}")
    assert not plain["column"]
    for name, x in found["differences"].items():
        assert x["column"], name
        assert max(x["engine"], x["reference"], x["float64"], x["ratio"]) < 1e-4 > plain["engine"]
        assert x["full"] > 0.1, "log-probs over the full vocabulary are others"
    assert max(found["gradients"]) < 1e-4
    assert len(found["trained"]) == 2 and max(found["trained"]) < 1e-4
    assert found["rloo"] < 1e-4
    assert found["types"] == {int}, "an earlier turn is in vLLM's prefix cache"


def rows_of(kept_ids: KeptIds) -> list[list[int]]:
    return [x.tolist() for x in kept_ids.ids.split(kept_ids.cu_kept.diff().tolist())]


def token(value: int, *entries: int) -> kept.SampledToken:
    made = kept.SampledToken(value)
    made.kept = array("i", entries)
    return made


def noted(completions: list[list[int]], tool_mask: Any = None, **settings: Any) -> Any:
    """The column of a batch of these completions."""
    generation = SimpleNamespace(top_p=0.5, top_k=0, min_p=None, temperature=1.0)
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=generation, **settings)

    def score() -> dict[str, Any]:
        kept.note_completions(trainer, completions, tool_mask)
        return {}

    return kept.score_completions(score).get(kept.COLUMN)


COMPLETIONS = [[token(5, 3, 5), 8, token(7)], [token(2, 2)], [token(4, 4, 6)]]
TOOL_MASK = [[1, 0, 1], [1], [1]]


def test_micro_batches_take_the_entries_of_their_labels() -> None:
    column = noted(COMPLETIONS, TOOL_MASK)
    assert list(map(rows_of, column)) == [[[3, 5], [8], []], [[2]], [[4, 6]]]
    replay, none = kept.Replay(column), [-100] * 2
    labels = torch.tensor([[*none, 5, 8, 7], [*none, -100, -100, -100], [*none, 4, -100, -100]])
    for _ in range(2):  # the second row's completion is masked; passes begin again
        assert rows_of(replay.take(labels[:2])) == [[3, 5], [8], []]
        assert rows_of(replay.take(labels[2:])) == [[4, 6]]


def test_entries_that_are_not_those_of_the_tokens_are_refused(caplog) -> None:
    message = message_of(lambda: noted(COMPLETIONS))
    assert message.startswith(
        "RolloutError: token 1 of a completion of 3 has no vocabulary entries"
    )
    replay = kept.Replay(noted(COMPLETIONS, TOOL_MASK))
    labels = torch.tensor([[-100, 5, 8, 7], [-100, 2, 3, -100]])
    assert "other completions than those that were sampled" in message_of(
        lambda: replay.take(labels)
    )
    batch = {kept.COLUMN: replay.kept}
    assert 'patch the group "head"' in message_of(
        lambda: kept.compute_loss(batch, lambda: torch.zeros(()))
    )
    sample = SimpleNamespace(token_ids=[3, 4], sampling_mask=SimpleNamespace(token_ids=[[3]]))
    message = message_of(lambda: kept.sampled_tokens(sample))
    assert "of 1 tokens for a completion of 2" in message
    assert noted([[3, 4], [5]]) is None
    assert "over the full vocabulary, though sampling was truncated" in caplog.text
