"""Models of their own code, as the files of a checkpoint beside its config.json.

save_own_code(folder, DROPS_ARGUMENTS)  # trust_remote_code=True reads it
"""

import json
from pathlib import Path

from tests.tiny_models import save_tiny

__all__ = ["DROPS_ARGUMENTS", "SELECTS_KEYS", "UNCHANGED", "save_own_code"]

_HEAD = """
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM
"""

# Its attention gives AttentionInterface the mask, but not cu_seq_lens_q.
DROPS_ARGUMENTS = (
    _HEAD
    + """
class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask)


class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].self_attn = OwnAttention(config, 1)
"""
)

# Its attention computes over the `index_topk` tokens of the row that an indexer selects.
SELECTS_KEYS = (
    _HEAD
    + """
class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        scores = hidden_states.sum(-1, keepdim=True)
        count = min(self.config.index_topk, scores.shape[1])
        selected = scores >= scores.topk(count, dim=1).values[:, -1:]
        return super().forward(hidden_states * selected, *args, **kwargs)


class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].self_attn = OwnAttention(config, 1)
"""
)

UNCHANGED = (
    _HEAD
    + """
class OwnForCausalLM(LlamaForCausalLM):
    pass
"""
)


def save_own_code(folder: Path, code: str, **settings: int) -> str:
    """Write a tiny Llama whose class is in `code`; its type keeps the name that is known.

    settings: further entries of config.json.
    """
    save_tiny("llama", folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(code)
    return str(folder)
