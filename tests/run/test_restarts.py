"""The number of a start, in a store that keeps what the ranks of earlier starts wrote."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hybridengine.run import rank
from hybridengine.run.rank import number_of_start


def test_all_ranks_agree_on_the_number_of_a_start() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def store() -> dist.Store:
        limit = timedelta(seconds=60)
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)

    def start(ranks: tuple[int, ...], timeout_s: float = 60.0) -> list[int]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            numbers = [pool.submit(number_of_start, store(), r, 3, timeout_s) for r in ranks]
            found = [number.result() for number in numbers]
        for thread in threading.enumerate():  # that of rank 0, which ends when all have joined
            if thread.name == "start-number":
                thread.join()
        return found

    assert start((0, 1, 2)) == [1, 1, 1]
    with pytest.raises(dist.DistError, match="rank 0 has not started within 1 s"):
        start((1,), timeout_s=1)
    assert start((2, 1, 0)) == [2, 2, 2]
    with patch.object(rank, "answer_questions"):  # the thread is killed with its process
        assert start((0,)) == [3], "the others were killed before they asked"
    assert start((1, 2, 0)) == [4, 4, 4]
