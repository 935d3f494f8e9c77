"""Models of their own code, as the files of a checkpoint beside its config.json.

save_own_code(folder, DROPS_ARGUMENTS)  # trust_remote_code=True reads it
"""

import json
from pathlib import Path

from tests.tiny_models import save_tiny

__all__ = ["DROPS_ARGUMENTS", "UNCHANGED", "save_own_code"]

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

UNCHANGED = (
    _HEAD
    + """
class OwnForCausalLM(LlamaForCausalLM):
    pass
"""
)


def save_own_code(folder: Path, code: str) -> str:
    """Write a tiny Llama whose class is in `code`; its type keeps the name that is known."""
    save_tiny("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(code)
    return str(folder)
