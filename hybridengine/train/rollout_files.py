"""ScoredResponse files: texts of responses on rank 0, with what the update computes per token.

Texts are made where the responses were generated, then moved in order.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.engine.response import ARRAY_CODES, COLUMNS, Response
from hybridengine.kernels import token_policy_loss
from hybridengine.model import PackedBatch
from hybridengine.run.storage import atomic_file
from hybridengine.train.advantages import LossOptions
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.data import PromptSample
from hybridengine.train.exchange import RowExchange
from hybridengine.train.rollouts import MultiTurn, Rollouts, ScoredResponse

# Arguments of the loss that clipping depends on.
_CLIPPING = (
    "old_log_probs",
    "advantages",
    "response_mask",
    "loss_mode",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "selected",
    "cu_seqlens",
)


@contextmanager
def rollout_file(path: Path | None, is_main: bool) -> Iterator[Callable[[Rollouts], None]]:
    """Yield a function that appends rollouts to the jsonl file `path`, or does nothing for None.

    Rank 0 writes, atomically; it holds some MiB of the other ranks' lines at a time. The function
    is collective.
    """
    with ExitStack() as stack:
        file = None
        if path is not None and is_main:
            temporary = stack.enter_context(atomic_file(path))
            file = stack.enter_context(temporary.open("wb"))

        def append(rollouts: Rollouts) -> None:
            if path is not None:
                for piece in texts_on_rank0(rollouts, rollout_line):
                    if file is not None:
                        file.write(piece)

        yield append


def with_trained_columns(
    rollouts: Rollouts, batch: RolloutBatch, record: TokenRecord, old_log_probs: Tensor | None
) -> Rollouts:
    """Return rollouts with what training has computed of their tokens. Collective.

    It lies where the batch is trained on, and moves to where the responses were generated. A token
    of which a number was not computed has None: masked ones in the update, those of tools anywhere.

    old_log_probs: [R], computed before the update unless `record` has them; None: not computed.
    """
    assert batch.advantages is not None
    nothing = torch.zeros_like(batch.response_mask)
    sampled = ~nothing if batch.sampled is None else batch.sampled
    of_update = nothing if record.mask is None else record.mask
    columns = {name: (values, of_update) for name, values in record.columns.items()}
    columns["advantages"] = (batch.advantages, sampled)
    if old_log_probs is not None:
        columns.setdefault("old_log_probs", (old_log_probs, sampled))
    outcomes, world_size = rollouts.outcomes, dist.get_world_size()
    wanted = [(outcomes.ranks == r).nonzero().flatten().tolist() for r in range(world_size)]
    exchange = RowExchange(batch.placement.sources, wanted)
    lengths = outcomes.response_lengths
    own_lengths = lengths[outcomes.ranks == rollouts.rank].tolist()

    def move(values: Tensor) -> Sequence[Tensor]:
        return exchange(values, lengths).cpu().split(own_lengths)

    return rollouts.with_trained(
        {
            name: [
                [x if has else None for x, has in zip(v.tolist(), m.tolist(), strict=True)]
                for v, m in zip(move(values.float()), move(mask.to(torch.int8)), strict=True)
            ]
            for name, (values, mask) in columns.items()
        }
    )


def texts_on_rank0(
    rollouts: Rollouts,
    text_of: Callable[[PromptSample, ScoredResponse], str],
    rows: Sequence[int] | None = None,
) -> Iterator[bytes]:
    """Yield `text_of` the responses `rows` (None: all) in order, end to end, on rank 0.

    In pieces of some MiB; empty ones on the other ranks. Collective: every rank takes all pieces.
    """
    outcomes = rollouts.outcomes
    own_rows = (outcomes.ranks == rollouts.rank).nonzero().flatten().tolist()
    rows = range(len(outcomes)) if rows is None else rows
    wanted = set(rows)
    texts = [
        text_of(*pair).encode() if row in wanted else b""
        for row, pair in zip(own_rows, rollouts.with_prompts(), strict=True)
    ]
    sizes = rollouts.gather_numbers([len(text) for text in texts]).long()
    values = torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8)
    nothing: list[Sequence[int]] = [()] * (dist.get_world_size() - 1)
    exchange = RowExchange(outcomes.ranks, [rows, *nothing])
    for piece in exchange.pieces(values, sizes):
        yield piece.numpy().tobytes()


def rollout_line(sample: PromptSample, r: ScoredResponse) -> str:
    """Format a prompt and a scored response to it as one line of JSON.

    Results of the reward are the columns between `reward` and `advantage` or `finish_reason`, where
    the view finds them; one with the name of another column has the prefix reward/.
    """
    prompt = {
        "index": sample.index,
        "data_source": sample.data_source,
        "prompt": sample.prompt_text,
        "response": r.text,
        "ground_truth": _plain(sample.ground_truth),
        "reward": r.reward.score,
    }
    sampled, turns, checksums = r.response, r.multi_turn.turns, r.weights_checksums
    runs = sampled.versions
    response = {
        **({} if r.advantage is None else {"advantage": r.advantage}),
        "finish_reason": sampled.finish_reason,
        "weight_version": sampled.version,
        **({"weights_checksum": checksums[0]} if checksums else {}),
        **({"weight_versions": list(map(list, runs))} if len(runs) > 1 else {}),
        **({"weights_checksums": list(checksums)} if len(checksums) > 1 else {}),
        "prompt_ids": list(r.prompt_ids(sample)),
        "response_ids": list(sampled.token_ids),
        **({"images": images} if (images := _image_names(sample, r.multi_turn)) else {}),
        "log_probs": _engine_log_probs(sampled),
        **r.trained,
        **({"sampled": list(sampled.columns["sampled"]), "turns": list(turns)} if turns else {}),
        **_columns(sampled),
    }
    taken = prompt.keys() | response.keys()
    counted = {name: number for name, number in r.reward.counts.items() if number}
    results = {
        f"reward/{name}" if name in taken else name: value
        for name, value in {**r.reward.extras, **r.reward.texts, **counted}.items()
    }
    return json.dumps({**prompt, **results, **response}, ensure_ascii=False) + "\n"


def _engine_log_probs(response: Response) -> list[float | None]:
    """Return the log-probs of the engine, None for tokens that it has not sampled."""
    sampled = response.columns.get("sampled") or [1] * len(response.token_ids)
    return [float(x) if s else None for x, s in zip(response.log_probs, sampled, strict=True)]


def _image_names(sample: PromptSample, r: MultiTurn) -> list[str]:
    """Return the images in the tokens of prompt and response, in their order."""
    return [image.name for image in (*(() if r.context_ids else sample.images), *r.images)]


def _columns(response: Response) -> dict[str, Any]:
    """Return the declared columns that files have: an entry or a list per token, or `_encode` of
    one whose tokens differ in their number of entries."""
    return {
        name: np.asarray(values).reshape(-1, *COLUMNS[name].shape).tolist()
        if COLUMNS[name].counts is None
        else _encode(values, COLUMNS[name].dtype)
        for name, values in response.columns.items()
        if COLUMNS[name].in_files
    }


def _encode(values: Sequence[int | float], dtype: torch.dtype) -> str:
    """Return base64 of zlib of the entries, little-endian in `dtype`."""
    entries = np.asarray(values, f"<{ARRAY_CODES[dtype]}")
    return base64.b64encode(zlib.compress(entries.tobytes())).decode()


def _plain(value: Any) -> Any:
    """Convert types of parquet that JSON lacks, such as dates, decimals and bytes, to text."""
    return json.loads(json.dumps(value, default=str))


class TokenRecord:
    """The values of the tokens of a batch in the last pass of the update over them.

    Attributes:
        columns: by name, float32 [R]. entropy: of the policy, nats. clipped: 1 where a clip, a mask
          or a selection of the loss took effect, else 0. old_log_probs: only where the update
          computes them (`Actor.update_once`).
        mask: bool [R], the tokens in the loss, which alone have these values; None: none has.
    """

    def __init__(self) -> None:
        self.columns = dict[str, Tensor]()
        self.mask: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        batch: RolloutBatch,
        micro_batch: PackedBatch,
        log_probs: Tensor,
        entropy: Tensor,
        options: LossOptions,
    ) -> None:
        """Take a micro-batch. log_probs, entropy: [r]. options: of its loss."""
        assert options.response_mask is not None
        if self.mask is None:  # a replica without responses has mask and columns as well
            self.mask = torch.zeros_like(batch.response_mask)
        if not micro_batch.is_dummy:
            self.mask[micro_batch.row_index] = options.response_mask
        if options.old_log_probs is None:
            self._set("old_log_probs", batch, micro_batch, log_probs)
        self._set("entropy", batch, micro_batch, entropy)
        if options.loss_mode != "geo_mean":  # which clips by the whole response
            chosen = {name: getattr(options, name) for name in _CLIPPING}
            losses = token_policy_loss(log_probs.detach(), **chosen)
            clipped = losses.clipped | losses.clipped_lower
            self._set("clipped", batch, micro_batch, clipped)

    def _set(
        self, name: str, batch: RolloutBatch, micro_batch: PackedBatch, values: Tensor
    ) -> None:
        if name not in self.columns:
            self.columns[name] = torch.zeros_like(batch.rollout_log_probs)
        if not micro_batch.is_dummy:
            self.columns[name][micro_batch.row_index] = values.to(torch.float32)
