"""The attention of one rollout, by running a checkpoint on its tokens; the entropies as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.errors import ConfigError

__all__ = ["Attention", "compute_attention"]

_MAX_BYTES = 48 << 20  # of the matrices in a page


@dataclass(frozen=True)
class Attention:
    """The attention weights of the last `len(token_ids)` tokens of prompt and response.

    weights: uint8, layers x heads x T x T, 255 stands for 1.
    prompt_tokens: how many of the T tokens are the prompt's.
    """

    layers: int
    heads: int
    token_ids: list[int]
    prompt_tokens: int
    weights: bytes


def compute_attention(row: Mapping[str, Any], checkpoint: Path) -> tuple[Attention, list[float]]:
    """Run the model of `checkpoint` on a response.

    row: a row of a rollout file.
    checkpoint: a Hugging Face folder.
    Returns (attention, entropy of each response token in nats). A long rollout keeps the attention
    among its last tokens.
    """
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} is no Hugging Face folder (no config.json); give one with --checkpoint, "
            "or write one with `hybridengine export RUN --out FOLDER`"
        )
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids, start = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    matrices = [x[0] for x in output.attentions if x is not None]
    if not matrices:
        raise ConfigError(f"the model of {checkpoint} returns no attention weights")
    layers, heads = len(matrices), matrices[0].shape[0]
    size = min(len(ids), int((_MAX_BYTES / (layers * heads)) ** 0.5))
    kept = torch.stack([(x[:, -size:, -size:] * 255).round().byte() for x in matrices])
    log_probs = output.logits[0, start - 1 : -1].log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    first = len(ids) - size
    attention = Attention(layers, heads, ids[first:], max(0, start - first), kept.numpy().tobytes())
    return attention, entropies.tolist()
