"""A column that an engine records per token, declared once, arrives where its tokens do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.engine.response import COLUMNS, TokenColumn, declare_column
from tests.ranks import run_ranks

pytestmark = pytest.mark.multirank

SHAPE = (2, 3)  # layers, experts of a token
FILL = -1


def routed(position: int) -> list[int]:
    """The entries of the sampled token at `position` of a response."""
    return [300 * position + k for k in range(6)]


def send_columns(rank: int, world_size: int) -> Any:
    """From completions, through turns, messages, files and ranks, to micro-batches."""
    from hybridengine.agents import TokenSequence, Turn
    from hybridengine.agents.template import Segment
    from hybridengine.engine.response import Response
    from hybridengine.run.messages import decode, encode
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.data import PromptSample, Subset
    from hybridengine.train.rollout_files import rollout_line
    from hybridengine.train.rollouts import Rollouts, ScoredResponse

    declare_column(TokenColumn("layer_numbers", torch.int16, SHAPE, fill=FILL))
    sample = PromptSample(0, [5, 6, 7], "", "toy", None, {})
    own, lines = [], []
    for k in range(3 if rank == 0 else 0):
        sequence = TokenSequence([])
        for start, tokens in ((0, [10 * k + 10, 10 * k + 11]), (4, [10 * k + 14])):
            columns = {
                "layer_numbers": [
                    x for i in range(len(tokens)) for x in routed(10 * k + 10 + start + i)
                ]
            }
            sampled = Response(tokens, [-1.0] * len(tokens), "stop", columns=columns)
            sequence.append_sampled(sampled, "", Turn("assistant", ""))
            if start == 0:
                sequence.append(Segment("", [10 * k + 12, 10 * k + 13]))  # of a tool
        [received] = decode(encode([sequence.response]), list[Response], "a test")
        own.append(ScoredResponse(received.compact()))
        lines.append(json.loads(rollout_line(sample, own[-1])))
    rollouts = Rollouts.gather(Subset([sample], [0]), own, rank)
    dp = DataParallel(Session(PhaseStatus(Path("/nonexistent"), rank)), 1, shared_prefix=True)
    batch = dp.build_batch(rollouts, 1, 16)
    column = batch.columns["layer_numbers"]
    parts = [
        (micro.target_ids, micro.take(column))
        for micro in batch.micro_batches
        if not micro.is_dummy
    ]
    return parts, lines


def expected(token: int) -> list[list[int]]:
    entries = [FILL] * 6 if token % 10 in (2, 3) else routed(token)
    return torch.tensor(entries).reshape(SHAPE).tolist()


def test_a_declared_column_arrives_in_micro_batches_and_files() -> None:
    """Two ranks, of which one generated; a prompt that is shared; turns of a tool in between."""
    results = run_ranks(send_columns, 2)
    seen = []
    for parts, _ in results:
        assert parts, "both ranks train"
        for target_ids, column in parts:
            assert column.dtype == torch.int16
            assert column.tolist() == [expected(token) for token in target_ids.tolist()]
            seen += target_ids.tolist()
    assert sorted(seen) == [10 * k + i for k in (1, 2, 3) for i in range(5)]
    for line in results[0][1]:
        assert line["layer_numbers"] == [expected(token) for token in line["response_ids"]]


def test_a_response_is_cut_and_continued_with_its_columns() -> None:
    from hybridengine.engine.response import Response

    columns = {"num_kept": [2, 0, 1], "kept_ids": [4, 5, 9]}
    response = Response([4, 7, 9], [-1.0, -2.0, -3.0], "stop", [(1, 3)], columns)
    cut = response.first(2)
    assert (cut.token_ids, cut.finish_reason, cut.versions) == ([4, 7], "length", [(1, 2)])
    assert cut.columns == {"num_kept": [2, 0], "kept_ids": [4, 5]}
    joined = Response([3], [-1.0], "interrupted", [(1, 1)]).join(response)
    assert {name: list(x) for name, x in joined.columns.items()} == {
        "num_kept": [0, 2, 0, 1],
        "kept_ids": [4, 5, 9],
    }


def test_a_second_declaration_must_be_the_same() -> None:
    declare_column(COLUMNS["num_kept"])
    with pytest.raises(ValueError, match="num_kept"):
        declare_column(TokenColumn("num_kept", torch.int16))
