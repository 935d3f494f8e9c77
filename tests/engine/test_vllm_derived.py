"""What vLLM makes of its weights after loading follows them: packed experts, MLA's products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.engine.vllm.environment import CPU_BLOCK_SIZE
from tests.architectures.catalogue import CATALOGUE
from tests.engines import build_engine
from tests.ranks import run_ranks
from tests.tensors import whole

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

PROMPTS = [[1, 5, 9, 33, 2], [7, 8, 9, 10, 11, 12, 13]]
MAX_TOKENS = 6


def train(folder: str, kind: str, dtype: torch.dtype):
    """Sync, generate, train, sync, generate: (engine, model, what it generated at last)."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import parameter_shards
    from hybridengine.model.parameters import checkpoint_layout
    from hybridengine.sync.resharder import Resharder

    torch.manual_seed(0)
    config = CATALOGUE[kind].config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter) + (parameter.ndim == 1)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    engine = build_engine(
        "vllm",
        folder,
        checkpoint=checkpoint_layout(model),
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_gib=64 / 1024,
    )
    fully_shard(model)
    resharder = Resharder(lambda: parameter_shards(model), engine, bucket_bytes=1 << 20)
    resharder.sync(1)
    before = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=MAX_TOKENS), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    resharder.sync(2)
    after = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=MAX_TOKENS), seed=0)
    assert [c[0].log_probs for c in after] != [c[0].log_probs for c in before]
    return engine, model, after


def trained_body(rank: int, world_size: int, folder: str, kind: str) -> list:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from hybridengine.train.checkpoint.pretrained import save_pretrained

    _, model, after = train(folder, kind, torch.float32)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    save_pretrained(model, words, f"{folder}/exported", torch.float32)
    for prompt, (response,) in zip(PROMPTS, after, strict=True):
        ids = torch.tensor([*prompt, *response.token_ids])
        log_probs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, ids[len(prompt) :, None]).flatten().tolist()
        assert max(abs(a - b) for a, b in zip(response.log_probs, expected, strict=True)) < 1e-4
    return [(c[0].token_ids, c[0].log_probs) for c in after]


def loaded_body(rank: int, world_size: int, folder: str) -> list:
    """vLLM alone, from the exported checkpoint."""
    from hybridengine.engine.vllm.environment import prepare_environment
    from hybridengine.engine.vllm.post_load import of_all_heads

    prepare_environment()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    # vLLM's own rotates the queries of latent attention by other angles than the model has.
    RotaryEmbedding.forward_cpu = of_all_heads(RotaryEmbedding.forward_cpu)
    llm = LLM(
        model=f"{folder}/exported",
        dtype="float32",
        distributed_executor_backend="external_launcher",
        max_model_len=64,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        attention_backend="CPU_MLA",  # the one for AMX takes no float32
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    chosen = [o.outputs[0] for o in outputs]
    return [
        (list(c.token_ids), [s[t].logprob for s, t in zip(c.logprobs, c.token_ids, strict=True)])
        for c in chosen
    ]


def test_synced_engine_generates_as_one_loaded_from_the_export(tmp_path: Path) -> None:
    """DeepSeek-V2: latent attention multiplies out a weight, CPU experts are packed."""
    (synced,) = run_ranks(trained_body, 1, str(tmp_path), "deepseek_v2", timeout_s=500)
    (loaded,) = run_ranks(loaded_body, 1, str(tmp_path), timeout_s=500)
    for (ids, log_probs), (expected_ids, expected) in zip(synced, loaded, strict=True):
        assert ids == expected_ids
        assert max(abs(a - b) for a, b in zip(log_probs, expected, strict=True)) < 1e-5


def sinks_body(rank: int, world_size: int, folder: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the sinks that the attention backend reads, and the trained ones."""
    engine, model, _ = train(folder, "gpt_oss", torch.float16)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    assert cache.block_size == CPU_BLOCK_SIZE  # vLLM's default is 128
    modules = engine.model_runner.get_model().modules()
    backends = [getattr(module, "impl", None) for module in modules]
    used = [b.sinks.float() for b in backends if getattr(b, "sinks", None) is not None]
    trained = [whole(p) for n, p in model.named_parameters() if n.endswith("sinks")]
    return [(u.clone(), t.detach().half().float()) for u, t in zip(used, trained, strict=True)]


def test_parameters_that_a_backend_casts_as_it_first_runs_follow(tmp_path: Path) -> None:
    """gpt-oss in float16: the CPU's attention replaces its sinks by a float32 copy."""
    (layers,) = run_ranks(sinks_body, 1, str(tmp_path), timeout_s=500)
    assert layers
    for used, trained in layers:
        assert torch.equal(used, trained)
