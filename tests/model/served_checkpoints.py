"""vLLM's own view of a checkpoint: its load of all tensors, and what it samples from a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks

__all__ = ["serve", "served_errors"]

_STUBS = Path(__file__).parents[1] / "architectures" / "stubs"  # of torchvision, for its imports


def served_errors(folder: Path, dtype: str, loader: Any) -> tuple[str, torch.Tensor]:
    """Return vLLM's class, and how far its log-probs are from transformers' in float32.

    loader: an Auto class.
    """
    prompt = [5, 6, 7, 8, 9]
    [(name, tokens, log_probs)] = run_ranks(serve, 1, str(folder), dtype, prompt)
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return name, (torch.tensor(log_probs) - expected).abs()


def serve(
    rank: int, world_size: int, folder: str, dtype: str, prompt: list[int]
) -> tuple[str, list[int], list[float]]:
    """Return class, tokens and their log-probs of a greedy response by `vllm.LLM(folder)`.

    A body of `run_ranks`. vLLM raises an error for a tensor that it does not know, and for a
    parameter that no tensor has filled, also of the tower, which no prompt of text needs.
    """
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        sys.path.append(str(_STUBS))
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import registry
    from vllm.transformers_utils import processor

    registry._run_in_subprocess = lambda inspect: inspect()
    processor.cached_get_image_processor = lambda *args, **options: None
    llm = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=1 << 24,
        skip_tokenizer_init=True,
        language_model_only=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    found = answer.outputs[0]
    log_probs = [step[t].logprob for t, step in zip(found.token_ids, found.logprobs, strict=True)]
    config = llm.llm_engine.vllm_config
    config.compilation_config.static_forward_context = {}  # else "Duplicate layer name"
    if images := config.model_config.multimodal_config:
        images.language_model_only, images.limit_per_prompt = False, {}
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    return type(model).__name__, list(found.token_ids), log_probs
