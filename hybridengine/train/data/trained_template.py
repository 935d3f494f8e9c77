"""The chat template of a run as the tokenizer's own: what is saved prompts as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridengine.run.config.common import DatasetConfig
from hybridengine.train.data.chats import find_template
from hybridengine.vision import ImagePreparer

__all__ = ["set_trained_template", "with_defaults"]


def set_trained_template(
    tokenizer: Any, data: DatasetConfig, preparer: ImagePreparer | None
) -> None:
    """Replace the tokenizer's chat template by that of `ChatTemplate`, with its variables.

    A tokenizer without a template stays as it is if there is no other one.
    """
    own = None if preparer is None else preparer.chat_template
    named = tokenizer.chat_template
    if not (data.chat_template or own or named):
        return
    text = find_template(tokenizer, data.chat_template or own)
    text = with_defaults(text, data.apply_chat_template_kwargs)
    tokenizer.chat_template = {**named, "default": text} if isinstance(named, Mapping) else text


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Return a Jinja template that has values for variables which are not given to it.

    transformers and vLLM remove the line break after a block, so the rest stays as it is.
    """
    blocks = (
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in sorted(variables.items())
        if name.isidentifier()
    )
    prelude = "".join(blocks)
    return template if template.startswith(prelude) else f"{prelude}\n{template}"
