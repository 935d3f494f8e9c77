"""Classes of vLLM's own for the transformers models that it serves.

vLLM serves many types by the model of transformers (its Transformers backend), and makes the class
of that model compilable in place: other `__init__`, `__call__` and bases. A trainer's model in the
same process is of the same class, and then fails when it is built or called.

Rotary embeddings of these models are those of the trained one (`hybridengine.model.rotary`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

from hybridengine.model.rotary import fix_rotary_length


@contextmanager
def own_model_classes() -> Iterator[None]:
    """While open, vLLM derives a class where it would change one of transformers.

    The models that it builds meanwhile are of the derived class, also afterwards.
    """
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config

    decorate = decorators._support_torch_compile

    def decorate_derived(cls: type, *args: Any) -> type:
        is_derived = decorators.TorchCompileWithNoGuardsWrapper in cls.__bases__
        if is_derived or not issubclass(cls, PreTrainedModel):
            return decorate(cls, *args)
        build = cls.__init__

        @functools.wraps(build)
        def build_fixed(model: Any, *args: Any, **options: Any) -> None:
            build(model, *args, **options)
            if "input_ids" in inspect.signature(cls.forward).parameters:  # no vision encoder
                fix_rotary_length(model, get_current_vllm_config().model_config.max_model_len)

        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        derived: Any = decorate(
            type(cls.__name__, (cls,), members | {"__init__": build_fixed}), *args
        )

        @functools.wraps(build)
        def build_derived(model: Any, *args: Any, **options: Any) -> None:
            if type(model) is cls:
                model.__class__ = derived
                derived.__init__(model, *args, **options)
            else:
                build(model, *args, **options)

        stack.enter_context(patch.object(cls, "__init__", build_derived))
        return derived

    with ExitStack() as stack, patch.object(decorators, "_support_torch_compile", decorate_derived):
        yield
