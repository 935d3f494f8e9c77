"""What a screen shows of one response: its tokens, their values for colours, and its turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridengine.run.errors import ConfigError

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
    from transformers.utils.logging import disable_progress_bar

    from hybridengine.model.rotary import fix_rotary_length
    from hybridengine.model.validation import check_model, read_pretrained

    disable_progress_bar()
    path = str(checkpoint)
    config = check_model(path, keep_vision_tower=bool(row.get("images")))
    model = read_pretrained(path, config, attn_implementation="eager", dtype=torch.float32)
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


_SHOWN = {"prompt", "response", "turns"}  # in other places than the facts


@dataclass(frozen=True)
class Color:
    """A column that tokens are coloured by.

    low, high: the values that have the strongest of the two colours; the neutral value has none.
    neutral: 0, or 1 for a ratio, whose logarithm is compared.
    """

    name: str
    label: str
    low: float
    high: float
    neutral: float = 0.0

    def strength(self, value: float) -> float:
        """Return a number from -1 to 1."""
        low, high = self.low, self.high
        if self.neutral:
            value, low, high = (math.log(max(x, 1e-9)) for x in (value, low, high))
        limit = high if value > 0 else -low
        return max(-1.0, min(1.0, value / limit)) if limit else 0.0


COLORS = {
    color.name: color
    for color in (
        Color("log_prob", "log-prob of the engine", -6.0, 0.0),
        Color("advantage", "advantage", -2.0, 2.0),
        Color("difference", "probability, trainer minus engine", -0.1, 0.1),
        Color("ratio", "ratio trainer / engine; the importance weight", 0.5, 2.0, 1.0),
        Color("entropy", "entropy, nats", 0.0, 4.0),
        Color("clipping", "clipped: 1, or -1 where the advantage is negative", -1.0, 1.0),
    )
}


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of the model, or of tools and users: tokens `start` to `end`."""

    title: str
    is_model: bool
    start: int
    end: int


@dataclass(frozen=True)
class Detail:
    """One response.

    values: name of a coloring → a number per token.
    results: what the reward was computed from and returned besides the score, by name.
    facts: the other columns that are no list of numbers per token, by name.
    """

    prompt: str
    token_ids: Sequence[int]
    values: Mapping[str, Sequence[float]]
    parts: Sequence[Part]
    results: Mapping[str, Any]
    facts: Mapping[str, Any]


def detail_of(row: Mapping[str, Any]) -> Detail:
    """Return what is shown of a row of a rollout file."""
    columns = {
        name: value
        for name, value in row.items()
        if name not in _SHOWN and not (isinstance(value, list) and name != "ground_truth")
    }
    results = {name: columns.pop(name) for name in _results_of(row) if name in columns}
    values, parts = _color_values(row), _parts(row)
    return Detail(row["prompt"], row["response_ids"], values, parts, results, columns)


def _results_of(row: Mapping[str, Any]) -> list[str]:
    """Return the ground truth and what the reward returned: a line has that after `reward`."""
    after = list(row)[list(row).index("reward") + 1 :]
    returned = takewhile(lambda name: name not in ("advantage", "finish_reason"), after)
    return ["ground_truth", *returned]


def _color_values(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return name of a coloring → a number per token, NaN where it has none.

    ratio: the ratio that the rollout correction clips.
    clipping: 0 for tokens that are not clipped, 1 for clipped ones, -1 for clipped ones with a
      negative advantage.
    """
    named = ("log_probs", "old_log_probs", "advantages", "entropy", "clipped")
    columns = {
        name: [math.nan if x is None else x for x in row[name]] for name in named if name in row
    }
    engine, trainer = columns["log_probs"], columns.get("old_log_probs")
    values: dict[str, list[float]] = {"log_prob": engine}
    if "advantages" in columns:
        values["advantage"] = columns["advantages"]
    elif row.get("advantage") is not None:
        values["advantage"] = [row["advantage"]] * len(engine)
    if trainer is not None:
        pairs = list(zip(trainer, engine, strict=True))
        values["difference"] = [math.exp(p) - math.exp(q) for p, q in pairs]
        values["ratio"] = [math.exp(max(min(p - q, 20.0), -20.0)) for p, q in pairs]  # NaN stays
    if "entropy" in columns:
        values["entropy"] = columns["entropy"]
    if "clipped" in columns:
        signs = [math.copysign(1.0, advantage) for advantage in columns["advantages"]]
        values["clipping"] = [x * sign for x, sign in zip(columns["clipped"], signs, strict=True)]
    return values


def _parts(row: Mapping[str, Any]) -> list[Part]:
    """Split the tokens where the writer changes; one part for a response of one turn."""
    length = len(row["response_ids"])
    turns = iter([t for t in row.get("turns", ()) if t["role"] == "assistant"])
    parts, start = list[Part](), 0
    for is_model, tokens in groupby(row.get("sampled") or [1] * length):
        end = start + len(list(tokens))
        title = _title(next(turns, {})) if is_model else "tool or user"
        parts.append(Part(f"{title} · {end - start} tokens", bool(is_model), start, end))
        start = end
    return parts


def _title(turn: Mapping[str, Any]) -> str:
    calls = [str(call.get("name", "")) for call in turn.get("tool_calls", ())]
    reward = [f"reward {turn['reward']:g}"] if turn.get("reward") else []
    called = [f"calls {', '.join(calls)}"] if calls else []
    return " · ".join(["model", *called, *reward])


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of one token; its id in brackets without a tokenizer."""
    piece = tokenizer.id_to_token(token) if tokenizer is not None else None
    if piece is None:
        return f"[{token}]"
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return " " + text.lstrip(" ") if piece[0] in "▁Ġ" and len(piece) > 1 else text or piece
