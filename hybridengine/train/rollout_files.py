"""Rollout files: texts of responses on rank 0, with what the update computes per token.

Texts are made where the responses were generated, then moved in order.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.engine.response import ARRAY_CODES, COLUMNS, TokenColumn
from hybridengine.kernels import token_policy_loss
from hybridengine.model import PackedBatch
from hybridengine.run.storage import atomic_file
from hybridengine.train.advantages import LossOptions
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.data import PromptSample
from hybridengine.train.exchange import RowExchange
from hybridengine.train.rollouts import Rollouts, ScoredResponse

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


def with_training(
    rollouts: Rollouts,
    batch: RolloutBatch,
    record: TokenRecord,
    means: Tensor,
    old_log_probs: Tensor | None,
) -> Rollouts:
    """Return rollouts with what training has computed of their tokens. Collective.

    It lies where the batch is trained on, and moves to where the responses were generated. A token
    of which a number was not computed has None: masked ones in the update, those of tools anywhere.

    means: advantage of each response, [N].
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
    exchange, lengths = RowExchange(batch.placement.sources, wanted), outcomes.response_lengths
    own_rows = wanted[rollouts.rank]

    def move(values: Tensor) -> Sequence[Tensor]:
        return exchange(values, lengths).cpu().split(lengths[own_rows].tolist())

    trained = {
        name: [
            [x if has else None for x, has in zip(v.tolist(), m.tolist(), strict=True)]
            for v, m in zip(move(values.float()), move(mask.to(torch.int8)), strict=True)
        ]
        for name, (values, mask) in columns.items()
    }
    own = [
        replace(r, advantage=mean, trained={name: rows[k] for name, rows in trained.items()})
        for k, (r, mean) in enumerate(zip(rollouts.own, means[own_rows].tolist(), strict=True))
    ]
    return replace(rollouts, own=own)


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
    values = torch.from_numpy(np.asarray(bytearray(b"".join(texts)), np.uint8))
    nothing: list[Sequence[int]] = [()] * (dist.get_world_size() - 1)
    for piece in RowExchange(outcomes.ranks, [rows, *nothing]).pieces(values, sizes):
        yield piece.numpy().tobytes()


def format_rollout(sample: PromptSample, r: ScoredResponse) -> str:
    """Format prompt, response and results for the console."""
    named = {"score": r.reward.score, **r.reward.extras}
    results = [f"{name} {value:g}" for name, value in named.items()]
    results += [f"{name} {text[:100]!r}" for name, text in r.reward.texts.items()]
    return (
        f"scored sample: prompt {sample.prompt_text[-200:]!r}\n"
        f"  response {r.text[:300]!r}, ground truth {sample.ground_truth!r}\n"
        f"  {', '.join(results)}\n"
    )


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
        # Types of parquet that JSON lacks, such as dates, decimals and bytes, become text.
        "ground_truth": json.loads(json.dumps(sample.ground_truth, default=str)),
        "reward": r.reward.score,
    }
    sampled, place, checksums = r.response, r.multi_turn, r.weights_checksums
    runs, turns = sampled.versions, place.turns
    of_prompt = () if place.context_ids else sample.images
    images = [image.name for image in (*of_prompt, *place.images)]
    is_sampled = sampled.columns.get("sampled") or [1] * len(sampled.token_ids)
    response = {
        **({} if r.advantage is None else {"advantage": r.advantage}),
        "finish_reason": sampled.finish_reason,
        "weight_version": sampled.version,
        **({"weights_checksum": checksums[0]} if checksums else {}),
        **({"weight_versions": list(map(list, runs))} if len(runs) > 1 else {}),
        **({"weights_checksums": list(checksums)} if len(checksums) > 1 else {}),
        "prompt_ids": list(r.prompt_ids(sample)),
        "response_ids": list(sampled.token_ids),
        **({"images": images} if images else {}),
        "log_probs": [
            float(x) if s else None for x, s in zip(sampled.log_probs, is_sampled, strict=True)
        ],
        **r.trained,
        **({"sampled": list(sampled.columns["sampled"]), "turns": list(turns)} if turns else {}),
        **{
            name: _entries(COLUMNS[name], values)
            for name, values in sampled.columns.items()
            if COLUMNS[name].in_files
        },
    }
    taken = prompt.keys() | response.keys()
    counted = {name: number for name, number in r.reward.counts.items() if number}
    results = {
        f"reward/{name}" if name in taken else name: value
        for name, value in {**r.reward.extras, **r.reward.texts, **counted}.items()
    }
    return json.dumps({**prompt, **results, **response}, ensure_ascii=False) + "\n"


def _entries(column: TokenColumn, values: Sequence[int | float]) -> Any:
    """Return an entry or a list per token. Where tokens differ in their number of entries, return
    base64 of zlib of the entries, little-endian in the column's type."""
    if column.counts is None:
        return np.asarray(values).reshape(-1, *column.shape).tolist()
    entries = np.asarray(values, f"<{ARRAY_CODES[column.dtype]}")
    return base64.b64encode(zlib.compress(entries.tobytes())).decode()


class TokenRecord:
    """The values of the tokens of a batch in the last pass of the update over them.

    Attributes:
        columns: by name, float32 [R]. entropy: of the policy, nats. clipped: 1 where a clip, a mask
          or a selection of the loss took effect, else 0. old_log_probs: only where the update
          computes them (`Actor.update`).
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
        values = {} if options.old_log_probs is not None else {"old_log_probs": log_probs}
        values["entropy"] = entropy
        if options.loss_mode != "geo_mean":  # which clips by the whole response
            chosen = {name: getattr(options, name) for name in _CLIPPING}
            losses = token_policy_loss(log_probs.detach(), **chosen)
            values["clipped"] = losses.clipped | losses.clipped_lower
        if self.mask is None:  # a replica without responses has mask and columns as well
            self.mask = torch.zeros_like(batch.response_mask)
            self.columns = {n: torch.zeros_like(batch.rollout_log_probs) for n in values}
        if not micro_batch.is_dummy:
            self.mask[micro_batch.row_index] = options.response_mask
            for name, column in values.items():
                self.columns[name][micro_batch.row_index] = column.to(torch.float32)
