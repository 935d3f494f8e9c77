"""The attention of one rollout, by running a checkpoint on its tokens; the entropies as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridengine.run.errors import ConfigError

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


def compute_attention(
    row: Mapping[str, Any],
    checkpoint: Path,
    image_options: Mapping[str, Any] = MappingProxyType({}),
    max_model_len: int | None = None,
) -> tuple[Attention, list[float]]:
    """Run the model of `checkpoint` on a response.

    row: a row of a rollout file.
    checkpoint: a Hugging Face folder.
    image_options: `data.mm_processor_kwargs` of the run.
    max_model_len: the longest sequence of the run, in tokens.
    Returns (attention, entropy of each response token in nats). A long rollout keeps the attention
    among its last tokens.
    """
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} is no Hugging Face folder (no config.json); give one with --checkpoint, "
            "or write one with `hybridengine export RUN --out FOLDER`"
        )
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from hybridengine.model.rotary import fix_rotary_length
    from hybridengine.model.validation import auto_class

    disable_progress_bar()
    config = AutoConfig.from_pretrained(checkpoint)
    model = auto_class(config).from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    fix_rotary_length(model.eval(), max_model_len)
    ids, start = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
    tokens = torch.tensor([ids])
    with torch.no_grad(), _images_of(row, model, tokens, checkpoint, image_options) as arguments:
        output = model(tokens, **arguments, output_attentions=True, use_cache=False)
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


@contextmanager
def _images_of(
    row: Mapping[str, Any], model: Any, tokens: Any, checkpoint: Path, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield what the model reads of the images of a response, at their tokens [1, T].

    Raises ConfigError for an image that the run has not stored in a file.
    """
    names = row.get("images") or ()
    if lost := [name for name in names if name.startswith("sha256:")]:
        raise ConfigError(
            f"the rollout has the image {lost[0]}, which was in memory and is in no file; choose a "
            "rollout whose images are files"
        )
    if not names:
        yield {}
        return
    from hybridengine.vision import EncodedImage, load_image_preparer
    from hybridengine.vision.packed import PackedImages, placeholders_of

    preparer = load_image_preparer(model.config, str(checkpoint), options)
    if preparer is None:
        raise ConfigError(f"the rollout has images, and the model of {checkpoint} takes none")
    images = [preparer.inputs(EncodedImage.of_file("the rollout", Path(name))) for name in names]
    image_format = preparer.image_format
    is_image = image_format.mark(tokens[0], images, 0)[None]
    tensors = image_format.join(images)
    with placeholders_of(model, PackedImages(tensors, is_image)):
        yield tensors | image_format.token_types(is_image)
