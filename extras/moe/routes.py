"""The experts that an engine's routers selected, carried with the tokens that they led to.

An engine computes a row for each token of prompt and response but the last one.
In the columns `num_routed` and `routed_experts` a sampled token has the rows that were computed for
it: the first one those of the prompt, each other one that of the token before it. So the rows of a
response, end to end, are those of its sequence from the first token on, also after turns of tools.
"""

from __future__ import annotations

import base64
import zlib
from array import array

import numpy as np

__all__ = ["decode_routes", "pack_routes"]


def pack_routes(rows: np.ndarray, prompt_length: int, num_tokens: int) -> dict[str, array[int]]:
    """Return the columns num_routed and routed_experts of a completion.

    rows: [at least prompt_length + num_tokens - 1, layers, k], expert ids. Raises RuntimeError
    where there are fewer.

    Example:
        >>> columns = pack_routes(np.arange(8).reshape(4, 1, 2), prompt_length=2, num_tokens=3)
        >>> columns["num_routed"].tolist()
        [4, 2, 2]
    """
    needed = prompt_length + num_tokens - 1
    if len(rows) < needed:
        raise RuntimeError(
            f"the engine recorded the experts of {len(rows)} tokens for a prompt of "
            f"{prompt_length} and a completion of {num_tokens}, expected {needed}; set "
            "actor.router_replay=off"
        )
    size = int(np.prod(rows.shape[1:]))
    ids = array("h")
    ids.frombytes(np.ascontiguousarray(rows[:needed], np.int16).tobytes())
    counts = [prompt_length * size] + [size] * (num_tokens - 1)
    return {"num_routed": array("i", counts), "routed_experts": ids}


def decode_routes(text: str, layers: int, top_k: int) -> np.ndarray:
    """Return int16 [tokens, layers, top_k] of the entry routed_experts of a rollout file.

    tokens: those of prompt and response but the last.
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2").reshape(-1, layers, top_k)
