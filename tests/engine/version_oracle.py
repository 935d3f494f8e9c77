"""Log-probs of responses whose weights were updated in between, by Hugging Face's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["logits_by_version"]


@torch.no_grad()
def logits_by_version(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    response: Sequence[int],
    versions: Sequence[Sequence[int]],
    keep_kv: bool,
) -> Tensor:
    """Return the logits [T, V] that each token of a response was sampled from.

    models: by version. versions: runs of (version, number of tokens). keep_kv: every position's
    keys and values are those of the weights that computed it first, else of the token's version.
    """
    ids, begin, cache, rows = [*prompt, *response], len(prompt), None, []
    for version, count in versions:
        read = ids[: begin + count - 1]
        if keep_kv:  # the last token that older weights sampled is read by the new ones
            seen = 0 if cache is None else cache.get_seq_length()
            out = models[version](
                torch.tensor([read[seen:]]), past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
        else:
            out = models[version](torch.tensor([read]))
        rows.append(out.logits[0, -count:])
        begin += count
    return torch.cat(rows)
