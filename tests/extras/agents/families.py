"""Chat templates of model families, those that TRL ships and one as Mistral's; a tokenizer."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybridengine.agents import TurnTemplate
from hybridengine.run.config import DataConfig
from hybridengine.train.data.chats import ChatTemplate

__all__ = ["CHATML", "FAMILIES", "THINKING", "byte_tokenizer", "turn_template"]

_BAR = "\uff5c"  # in DeepSeek's special tokens
FAMILIES = {  # template of TRL, or text → the token that ends a turn
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
    "qwen3_8": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gemma4_v2": "<turn|>",
    "deepseekv3": f"<{_BAR}end\u2581of\u2581sentence{_BAR}>",
    "deepseek_r1_distill": f"<{_BAR}end\u2581of\u2581sentence{_BAR}>",
    "phi3": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "glm4moe": "<|user|>",
    "lfm2": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
    "gptoss": "<|return|>",
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Removes the thinking of turns before the last message of a user, as Qwen 3 does.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Refuses tool results without a call, and wants ids of nine characters.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles alternate') }}"
    "{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('id') }}"
    '{% endif %}[TOOL_RESULTS] {"content": {{ m.content }}}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{{ c.function|tojson }}{% endfor %}]</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
_OTHER_TOKENS = [
    *("<|im_start|>", "<|begin_of_text|>", "<bos>", "<s>", "</s>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<start_of_turn>", "<|turn>", f"<{_BAR}User{_BAR}>"),
    *(f"<{_BAR}Assistant{_BAR}>", "<|observation|>", "<|assistant|>", "[INST]", "[/INST]"),
]


@cache
def byte_tokenizer() -> Any:
    """A byte-level BPE tokenizer with merges, and the families' special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        "the answer is the result of the tool\n\n<tool_call>",
        "</think>\n\n the user asks",
    ] * 4
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    special = sorted({*FAMILIES.values(), *_OTHER_TOKENS})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
    )


def turn_template(family: str, tools: Any = ()) -> tuple[TurnTemplate, int]:
    """Return the template of a family, or of a Jinja text, and the token that ends a turn."""
    tokenizer = byte_tokenizer()
    end, text = FAMILIES.get(family, "<|im_end|>"), family
    if family in FAMILIES:
        spec = importlib.util.find_spec("trl")
        assert spec is not None and spec.origin is not None
        text = str(Path(spec.origin).parent / "chat_templates" / f"{family}.jinja")
        if family == "glm4moe" and tools:  # a turn ends with the role of the next one
            end = "<|observation|>"
    elif family == MISTRAL:
        end = "</s>"
    chats = ChatTemplate(tokenizer, DataConfig(chat_template=text), tools)
    stop = tokenizer.convert_tokens_to_ids(end)
    return TurnTemplate(chats, tokenizer, [stop]), stop
