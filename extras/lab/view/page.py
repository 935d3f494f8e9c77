"""The rollouts of a run as one HTML page that opens from disk and loads nothing else."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hybridengine.lab.view.detail import (
    COLORS,
    Attention,
    Detail,
    compute_attention,
    detail_of,
    text_of_token,
)
from hybridengine.lab.view.rollouts import Entry, RolloutIndex
from hybridengine.run.config import load_config
from hybridengine.run.errors import ConfigError
from hybridengine.run.storage import atomic_file

Shown = tuple[Entry, Attention, list[float]]  # with the entropy of each response token

_CHUNK = 64  # responses that the page unpacks at once


def attention_of(index: RolloutIndex, query: str, checkpoint: Path | None) -> Shown:
    """Run a checkpoint (None: the run's final/) on the first rollout that `query` selects."""
    entry = next(iter(index.select(query)), None)
    if entry is None:
        raise ConfigError(f"--attention {query!r} selects no rollout")
    folder = index.run / "final" if checkpoint is None else checkpoint.expanduser()
    file = index.run / "config.yaml"
    if not file.is_file():
        return entry, *compute_attention(index.read(entry), folder)
    config = load_config(file)
    options, longest = config.data.mm_processor_kwargs, config.max_model_len
    return entry, *compute_attention(index.read(entry), folder, options, longest)


def write_page(
    index: RolloutIndex, entries: Sequence[Entry], path: Path, attention: Shown | None = None
) -> None:
    """Write `entries` to `path`. The texts and numbers are compressed, in chunks of responses."""
    vocabulary = dict[int, str]()

    def tokens(ids: Sequence[int]) -> Sequence[int]:
        for token in ids:
            if token not in vocabulary:
                vocabulary[token] = text_of_token(index.tokenizer, token)
        return ids

    blobs = dict[str, str]()
    for k, chunk in enumerate(_batched(entries, _CHUNK)):
        rows = [_payload(index, entry, tokens, attention) for entry in chunk]
        blobs[f"texts{k}"] = _packed([row.pop("text") for row in rows])  # a search needs no more
        blobs[f"chunk{k}"] = _packed(rows)
    data: dict[str, Any] = {
        "run": index.run.name,
        "chunk": _CHUNK,
        "entries": [_row(entry) for entry in entries],
        "colors": [asdict(color) for color in COLORS.values()],
        "attention": None,
    }
    blobs["weights"] = ""
    if attention is not None:
        entry, found, _ = attention
        about = asdict(replace(found, weights=b""))
        tokens(found.token_ids)
        data["attention"] = about | {"entry": entries.index(entry), "weights": None}
        blobs["weights"] = _packed_bytes(found.weights)
    data["vocabulary"] = vocabulary
    page = files(__package__).joinpath("page.html").read_text()
    blobs["data"] = _packed(data)
    scripts = (f'<script type="text/plain" id="{k}">{blob}</script>' for k, blob in blobs.items())
    with atomic_file(path) as temporary:
        temporary.write_text(page.replace("<!--DATA-->", "\n".join(scripts)))


def _row(entry: Entry) -> list[Any]:
    return [
        entry.kind,
        entry.step,
        entry.row,
        entry.group,
        round(entry.reward, 6),
        entry.length,
        entry.finish_reason,
        entry.preview,
    ]


def _payload(
    index: RolloutIndex,
    entry: Entry,
    tokens: Callable[[Sequence[int]], Sequence[int]],
    attention: Shown | None,
) -> dict[str, Any]:
    row = index.read(entry)
    if attention is not None and attention[0] == entry:
        row["entropy"] = attention[2]
    detail: Detail = detail_of(row)
    return {
        "prompt": detail.prompt,
        "text": f"{detail.prompt}\n{row['response']}".lower(),
        "tokens": tokens(detail.token_ids),
        "values": {name: _rounded(values) for name, values in detail.values.items()},
        "parts": [[part.title, part.is_model, part.start, part.end] for part in detail.parts],
        "results": {name: str(value) for name, value in detail.results.items()},
        "facts": {name: str(value) for name, value in detail.facts.items()},
    }


def _rounded(values: Sequence[float]) -> list[float] | float:
    """Round to what a tooltip shows; one number stands for equal ones."""
    rounded: list[float] = np.asarray(values, np.float64).round(4).tolist()
    return rounded[0] if len({*rounded}) == 1 else rounded


def _packed(value: Any) -> str:
    return _packed_bytes(msgspec.json.encode(value))  # null for NaN and infinities


def _packed_bytes(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 4)).decode()


def _batched(entries: Sequence[Entry], size: int) -> list[Sequence[Entry]]:
    return [entries[k : k + size] for k in range(0, len(entries), size)]
