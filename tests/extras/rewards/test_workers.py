"""Worker processes: functions that hang, exit or crash; order, state, cleanup."""

import os
import random
import subprocess
import sys
import textwrap
import time

import pytest

from hybridengine.rewards import workers
from hybridengine.rewards.functions import BUILT_IN
from hybridengine.rewards.workers import RewardWorkers
from hybridengine.run import import_file
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import score_responses
from tests.ranks import Ranks

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"
REWARD = f"""
import os, signal, sys, time

calls = 0

def count({ARGUMENTS}):
    global calls
    calls += 1
    return {{"score": int(solution_str), "calls": calls, "pid": os.getpid()}}

def hostile({ARGUMENTS}):
    sys.stdout.write(f"scoring {{solution_str}}\\n")
    if solution_str == "exit": os._exit(0)
    if solution_str == "sys.exit": sys.exit(0)
    if solution_str == "interrupt": raise KeyboardInterrupt
    if solution_str == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "fork":
        if os.fork() == 0: time.sleep(60)
        os._exit(3)
    if solution_str == "close": os.closerange(3, 256); time.sleep(60)
    if solution_str == "long": raise ValueError("x" * 10_000)
    while solution_str == "swallow":
        try:
            time.sleep(0.01)
        except BaseException:
            pass
    if solution_str == "c loop": 3 ** (10**9)
    return 1.0

together = 0

async def judge({ARGUMENTS}):
    import asyncio
    global together
    together += 1
    while together < 3:  # no call ends unless all run
        await asyncio.sleep(0.001)
    if solution_str == "raise": raise ValueError("judged")
    await asyncio.sleep(60 if solution_str == "hang" else 0)
    return {{"score": float(solution_str == ground_truth), "pid": os.getpid()}}

async def judge_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool of two workers with a short time-out."""
    pool = RewardWorkers(2, timeout_s=1.5)
    pool.file = tmp_path_factory.mktemp("workers") / "reward.py"
    pool.file.write_text(REWARD)
    yield pool
    pool.close()


def samples(n):
    return [PromptSample(i, [1], f"prompt {i}", "sums", str(i), {}) for i in range(n)]


def test_order_and_state_of_workers(pool):
    count = pool.load(pool.file, "count")
    before, numbers = random.getstate(), [3, 1, 4, 1, 5]
    result = score_responses(count, samples(5), [str(n) for n in numbers])
    assert result.scores == numbers
    assert result.extras["calls"] == [1, 1, 2, 2, 3]  # worker 0 had 0, 2, 4; worker 1 had 1, 3
    first, second = result.extras["pid"][:2]
    assert result.extras["pid"] == [first, second, first, second, first]
    assert os.getpid() not in (first, second) and random.getstate() == before
    again = score_responses(count, samples(2), ["7", "8"])  # the same processes, with their state
    assert again.extras == {"calls": [4, 3], "pid": [first, second]}
    assert score_responses(count, [], []).scores == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("exit", "hostile ended its process with exit code 0 at .*:11; prompt 'prompt 1'"),
        ("sys.exit", "hostile raised SystemExit: 0 at .*reward.py:14; prompt 'prompt 1'"),
        ("interrupt", "hostile raised KeyboardInterrupt:  at .*reward.py:15; "),
        ("crash", "hostile had its process killed by SIGSEGV at .*; prompt 'prompt 1', resp"),
        ("kill", "hostile had its process killed by SIGKILL at"),
        ("fork", "hostile ended its process with exit code 3 at"),
        ("long", "raised ValueError: x{500}…x{499} at .*reward.py:22; "),
        ("swallow", r"no result within reward.timeout_s = 1.5 s at .*reward.py:2[3-7]; prompt 'pr"),
        (
            "c loop",
            r"no result within reward.timeout_s = 1.5 s at .*reward.py:28; prompt 'prompt 1'",
        ),
    ],
)
def test_a_call_that_does_not_return(pool, capfd, response, message):
    hostile = pool.load(pool.file, "hostile")
    with pytest.raises(RewardError, match=message) as error:
        score_responses(hostile, samples(3), ["fine", response, "fine"])
    assert f"response '{response}', ground truth '1'" in str(error.value)
    result = score_responses(hostile, samples(3), ["a", "b", "c"])  # by new workers
    assert result.scores == [1.0] * 3
    assert {"scoring a", "scoring b", "scoring c"} <= set(capfd.readouterr().out.splitlines())


def test_a_worker_that_closes_its_connection(pool, monkeypatch):
    monkeypatch.setattr(workers, "STOP_S", 0.1)
    hostile = pool.load(pool.file, "hostile")
    with pytest.raises(RewardError, match="hostile closed the connection of its process"):
        score_responses(hostile, samples(1), ["close"])


@pytest.mark.slow
def test_async_functions_run_together(pool):
    judge = pool.load(pool.file, "judge")
    result = score_responses(judge, samples(4), ["0", "9", "2", "9"])
    assert result.scores == [1.0, 0.0, 1.0, 0.0]
    assert len(set(result.extras["pid"])) == 1
    with pytest.raises(RewardError, match=r"judge raised ValueError: judged at .*; prompt '"):
        score_responses(judge, samples(3), ["0", "raise", "2"])
    with pytest.raises(
        RewardError, match=r"judge returned no result within .* 1.5 s.*prompt 'prompt 2'"
    ):
        score_responses(judge, samples(3), ["0", "1", "hang"])


def test_an_async_batch_function(pool):
    arguments = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    judge = pool.load(pool.file, "judge_batch", arguments)
    assert score_responses(judge, samples(3), ["0", "9", "2"]).scores == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(0)", r"reward\.py:2 fails to import: SystemExit: 0"),
        ("import os\nos._exit(0)", r"reward\.py ended its process with exit code 0 while it"),
    ],
)
def test_a_file_that_ends_its_process(tmp_path, source, message):
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(RewardError, match=message):
        RewardWorkers().load(tmp_path / "reward.py")


def test_a_file_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LOAD_S", 1.0)
    (tmp_path / "reward.py").write_text("import time\nwhile True:\n    time.sleep(0.01)")
    with pytest.raises(RewardError, match=r"reward\.py(:[23])? takes longer than 1 s to import"):
        RewardWorkers(1, timeout_s=0.1).load(tmp_path / "reward.py")


def test_workers_import_only_the_standard_library_and_share_no_stdin(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import os, sys\n"
        f"def compute_score({ARGUMENTS}):\n"
        "    names = {name.partition('.')[0] for name in sys.modules}\n"
        "    known = {'hybridengine', 'coverage', *sys.stdlib_module_names}\n"
        "    others = sorted(n for n in names - known if not n.startswith('_'))\n"  # _: of site
        "    assert not others, others\n"
        "    return {'score': 0, 'stdin': len(sys.stdin.read())}\n"
    )
    result = score_responses(RewardWorkers().load(tmp_path / "reward.py"), samples(1), ["x"])
    assert result == type(result)([0.0], {"stdin": [0.0]})


def test_functions_of_one_file_share_its_module(tmp_path):
    (tmp_path / "reward.py").write_text(
        "seen = []\n"
        f"def one({ARGUMENTS}):\n    seen.append(1)\n    return len(seen)\n"
        f"def two({ARGUMENTS}):\n    return len(seen)\n"
    )
    pool = RewardWorkers(1)
    one, two = (pool.load(tmp_path / "reward.py", n) for n in ("one", "two"))
    assert score_responses(one, samples(2), ["", ""]).scores == [1, 2]
    assert score_responses(two, samples(1), [""]).scores == [2]


HOSTILE_ANSWERS = [
    r"\boxed{9^{9^9}}",
    r"\boxed{100000000!}",
    r"\boxed{10^{10^{10^{10}}}}",
]
NESTED = "\\boxed{" + "(" * 500 + "}"  # depends on the machine: a deep recursion, or too long


@pytest.mark.parametrize("rule", ["math_verify", "data_source"])
def test_a_built_in_rule_gives_up_on_an_answer_and_goes_on(rule) -> None:
    """Integers of a billion digits and parsers without end never return to the interpreter."""
    hostile = HOSTILE_ANSWERS if rule == "math_verify" else HOSTILE_ANSWERS[:1]
    given = ["7", *hostile, r"\boxed{7}", "8", NESTED]
    rows = [PromptSample(i, [1], "", "math", "7", {}) for i in range(len(given))]
    with_rule = RewardWorkers(2, timeout_s=300)
    try:
        result = score_responses(with_rule.load(rule), rows, given)
    finally:
        with_rule.close()
    [*timed_out, _] = result.counts["timed_out"]
    assert timed_out == [float(text in hostile) for text in given[:-1]]
    assert result.scores == [1.0, *[0.0] * len(hostile), 1.0, 0.0, 0.0]


GREEDY = f"""
import os

def compute_score({ARGUMENTS}):
    if solution_str == "memory": bytearray(3 << 30)
    if solution_str == "recursion": compute_score(data_source, "recursion", "", None)
    if solution_str == "abort": os.abort()  # as C++ does without memory
    return 1.0
"""


def test_a_built_in_rule_gives_up_on_too_much_memory(tmp_path, monkeypatch) -> None:
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    register = (
        "from hybridengine.rewards import functions; from pathlib import Path\n"
        f"functions.BUILT_IN['greedy'] = lambda: functions.import_file(Path({str(file)!r}))\n"
    )
    program = workers.PROGRAM.replace("from ", register.replace("{", "{{") + "from ", 1)
    monkeypatch.setattr(workers, "PROGRAM", program)
    monkeypatch.setitem(BUILT_IN, "greedy", lambda: import_file(file))
    pool = RewardWorkers(1, timeout_s=300)
    try:
        given = ["a", "memory", "b", "recursion", "c", "abort", "d"]
        result = score_responses(pool.load("greedy"), samples(len(given)), given)
    finally:
        pool.close()
    assert result.scores == [1, 0, 1, 0, 1, 0, 1]
    assert result.counts == {"timed_out": [0, 1, 0, 1, 0, 1, 0]}
    assert result.extras == {}  # no result of validation


STARTS_OTHERS = f"""
import os, subprocess, sys, time
from pathlib import Path

SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
LEAVE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{SLEEP!r}}])"

def compute_score({ARGUMENTS}):
    pids = []
    for program in (SLEEP, LEAVE):  # the second one is left without its parent
        command = [sys.executable, "-c", program]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        pids.append(child.stdout.readline().decode().strip())
    file = Path(__file__).with_name("pids.part")
    file.write_text(" ".join(pids))
    file.rename(file.with_name("pids"))
    if solution_str == "stay": time.sleep(600)
    if solution_str == "crash": os.abort()
    return 1.0
"""


def started(folder) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("ending", ["close", "late", "crash"])
def test_what_a_function_has_started_ends_with_its_worker(tmp_path, ending) -> None:
    """Also processes of other sessions, and ones that have lost their parent."""
    (tmp_path / "reward.py").write_text(STARTS_OTHERS)
    pool = RewardWorkers(1, timeout_s=15 if ending == "late" else 120)
    function = pool.load(tmp_path / "reward.py")
    if ending == "close":
        assert score_responses(function, samples(1), [""]).scores == [1]
        assert all(map(is_running, started(tmp_path)))
    else:
        answer, message = ("stay", "no result within") if ending == "late" else ("crash", "SIGABRT")
        with pytest.raises(RewardError, match=message):
            score_responses(function, samples(1), [answer])
    pool.close()
    pids = started(tmp_path)
    assert len(pids) == 2 and not any(map(is_running, pids))


@pytest.mark.multirank
def test_what_a_function_has_started_ends_with_a_killed_rank(tmp_path) -> None:
    (tmp_path / "reward.py").write_text(STARTS_OTHERS.replace('== "stay"', '== ""'))
    with Ranks(score_for_ever, 1, tmp_path / "reward.py") as ranks:
        wait_for((tmp_path / "pids").exists, 120)
        pids = started(tmp_path)
        assert len(pids) == 2 and all(map(is_running, pids))
        ranks.processes[0].kill()
        wait_for(lambda: not any(map(is_running, pids)), 60)


def score_for_ever(rank, world_size, file):
    score_responses(RewardWorkers().load(file), samples(1), [""])


@pytest.mark.multirank
def test_workers_end_with_a_killed_rank(tmp_path):
    """Also while the worker is busy."""
    (tmp_path / "reward.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        f"def compute_score({ARGUMENTS}):\n"
        "    here = Path(__file__).parent\n"
        "    (here / 'begun').write_text(str(os.getpid()))\n"
        "    (here / 'begun').rename(here / 'worker')\n"
        "    time.sleep(600)\n"
    )
    with Ranks(score_for_ever, 1, tmp_path / "reward.py") as ranks:
        wait_for((tmp_path / "worker").exists, 120)
        worker = int((tmp_path / "worker").read_text())
        assert is_running(worker)
        ranks.processes[0].kill()
        wait_for(lambda: not is_running(worker), 60)


def wait_for(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_reset_connection_ends_a_worker_without_a_traceback() -> None:
    """As when a rank is killed before it has read all results."""
    program = textwrap.dedent("""
        import os
        from multiprocessing.connection import Pipe
        from hybridengine.rewards.worker_main import main
        ours, theirs = Pipe()
        theirs.send("not read")
        ours.close()
        main(os.dup(theirs.fileno()), 2, os.getppid(), 0)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_deleted_pool_ends_its_workers(tmp_path):
    (tmp_path / "reward.py").write_text(
        f"import os\ndef compute_score({ARGUMENTS}):\n    return os.getpid()\n"
    )
    function = RewardWorkers().load(tmp_path / "reward.py")
    [pid] = score_responses(function, samples(1), [""]).scores
    assert is_running(int(pid))
    del function
    assert not is_running(int(pid))
