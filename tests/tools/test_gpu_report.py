"""The parts of the GPU report without a GPU: rows are kept, resumed and limited in time."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks._bench import OURS, Bench, quantiles
from tools import gpu_build, gpu_profile, gpu_report, gpu_sanitize, gpu_tests, triton_cache
from tools.package_links import write_entry_points

# A part of two rows: resumes, and stalls or fails after its first row where `first` says so.
PART = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
rows = json.loads(file.read_text())["rows"] if "--resume" in sys.argv else []
first = sys.argv[1]
if not rows:
    file.write_text(json.dumps({"rows": ["row 1"]}))
    if first == "stalls":
        time.sleep(60)
    if first == "fails":
        sys.exit(4)
    if first == "loses":
        sys.exit(3)
if first == "crashes":
    import os
    os.abort()
file.write_text(json.dumps({"rows": [*rows, "row 2"]}))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(part, how it ends, resume, commit) → (its status, all sections of the results file)."""
    monkeypatch.setattr(gpu_report, "WORK", tmp_path)
    file = tmp_path / "results" / "device.json"

    def run(part: str, how: str, resume: bool = False, commit: str = "c0ffee"):
        results = gpu_report.Results(file, {"device": "a GPU", "commit": commit})
        status = gpu_report.run_part(
            *(part, [sys.executable, "-c", PART, how], results),
            resume=resume,
            environment=dict(os.environ),
            limit_s=5.0 if how == "stalls" else 120.0,
        )
        document = json.loads(file.read_text())
        assert document["device"] == "a GPU"
        return status, document["parts"]

    return run


@pytest.mark.slow
def test_a_part_that_fails_or_stalls_keeps_its_rows_and_those_of_others(run):
    status, parts = run("kernels", "fails")
    assert status == parts["kernels"]["status"] == "exit code 4"
    assert parts["kernels"]["rows"] == ["row 1"]
    status, parts = run("step", "stalls")
    assert status == "not finished after 5 s" and parts["step"]["rows"] == ["row 1"]
    assert parts["step"]["sources_commit"] == "c0ffee" and parts["step"]["seconds"] >= 5
    status, parts = run("build", "passes")
    assert status == "passed" and list(parts) == ["build", "kernels", "step"], "in order of PARTS"
    assert parts["kernels"]["rows"] == ["row 1"]


def test_a_part_is_resumed_at_the_same_commit_only(run):
    run("kernels", "fails")
    status, parts = run("kernels", "fails", resume=True, commit="0ddba11")
    assert status == "exit code 4" and parts["kernels"]["rows"] == ["row 1"]
    status, parts = run("kernels", "fails", resume=True, commit="0ddba11")
    assert status == "passed" and parts["kernels"]["rows"] == ["row 1", "row 2"]
    assert run("kernels", "fails")[0] == "exit code 4", "without --resume it starts anew"


def test_every_part_has_a_command_that_is_there():
    root = gpu_report.ROOT
    parts = ("build", "kernels", "vllm", "tests", "profile", "step", "reshard", "sanitize")
    assert tuple(gpu_report.PARTS) == parts, "by value"
    limits = [gpu_report.LIMITS_S.get(part, gpu_report.LIMIT_S) for part in parts]
    assert sum(limits[1:-1]) <= 2400, "with the build of a pack all but the last take 40 minutes"
    for script, *arguments in gpu_report.ALL_PARTS.values():
        assert (root / script).is_file() or script == "-m"
        for name in arguments[1:]:
            if name.startswith("--"):
                break
            assert (root / "benchmarks" / f"{name}.py").is_file(), name


@pytest.mark.slow
def test_every_operator_of_rows_has_one(monkeypatch):
    from benchmarks import __main__ as command

    counts, run = {}, command.run

    def counted(bench, name):
        before = len(bench.rows)
        passed = run(bench, name)
        counts[name] = sum(row["impl"] == OURS for row in bench.rows[before:])
        return passed

    monkeypatch.setattr(command, "run", counted)
    monkeypatch.setattr(Bench, "measure", lambda *_: quantiles([1.0]) | {"peak_mib": 0.0})
    _, _, *arguments = gpu_report.MORE_PARTS["rows"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--device", "cpu", "--quick"])
    assert command.main() == 0
    assert list(counts) == list(gpu_report.ROWS) and all(counts.values()), counts


@pytest.mark.slow
def test_kernels_of_both_passes_are_compiled_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    file = "tests/kernels/test_linear_attention_triton.py"
    test = f"{file}::test_convolution_on_the_gpu[(3, False, True, None, torch.float32)]"
    command = [sys.executable, "tools/triton_cache.py", str(tmp_path), test]
    subprocess.run(command, cwd=gpu_report.ROOT, check=True, timeout=500)
    compiled = {file.stem for file in tmp_path.glob("*/*.cubin")}
    assert {"forward_kernel", "first_grads_kernel", "backward_kernel"} <= compiled
    summary = json.loads((tmp_path / triton_cache.SUMMARY).read_text())
    assert summary["compiled"] > 2 and not summary["complete"], "of one test"
    assert summary["errors"] == {} and [*tmp_path.glob("*.json")] == [tmp_path / "cache.json"]


def test_entries_of_a_cache_of_triton_that_nothing_used_are_removed(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    for key in ("aa", "bb", "cc"):
        get_cache_manager(key).put(b"code", "kernel.cubin")
    (tmp_path / triton_cache.SUMMARY).touch()
    used = triton_cache.record_entries()
    assert get_cache_manager("aa").get_file("kernel.cubin")
    get_cache_manager("dd").put(b"code", "kernel.cubin")
    triton_cache.remove_others(tmp_path, used)
    kept = {get_cache_manager(key).key for key in ("aa", "dd")} | {triton_cache.SUMMARY}
    assert {file.name for file in tmp_path.iterdir()} == kept


STALLED = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def run_parts(tmp_path, monkeypatch):
    """run_parts(commands by part, parts as arguments, limit) → (statuses, sections)."""
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")

    def run(commands: dict[str, tuple], parts: list[str], limit_s: float):
        monkeypatch.setattr(gpu_report, "ALL_PARTS", commands)
        results = gpu_report.Results(tmp_path / "out" / "1.json", {"commit": None})
        environment = gpu_report.Environment(None, None, None)
        chosen = [gpu_report.Part.of(part) for part in parts]
        statuses = gpu_report.run_parts(
            chosen, results, environment, [], limit_s=limit_s, resume=False
        )
        return statuses, json.loads((tmp_path / "out" / "1.json").read_text())["parts"]

    return run


@pytest.mark.slow
def test_a_part_over_its_limit_is_ended_with_its_children_and_the_next_runs(run_parts, tmp_path):
    pid = tmp_path / "pid"
    commands = {"stalls": ("-c", STALLED, str(pid)), "next": ("-c", PART, "passes")}
    statuses, parts = run_parts(commands, ["stalls=3", "next"], 120.0)
    assert statuses == {"stalls": "not finished after 3 s", "next": "passed"}
    assert has_ended(int(pid.read_text())), "a child in a process group of its own"
    assert parts["next"]["rows"] == ["row 2"]


@pytest.mark.slow
def test_parts_run_beside_others_and_all_end_with_the_whole_limit(run_parts, tmp_path):
    pid = tmp_path / "pid"
    commands = {
        "beside": ("-c", STALLED, str(pid)),
        "first": ("-c", PART, "passes"),
        "late": ("-c", "import time; time.sleep(60)"),
        "never": ("-c", PART, "passes"),
    }
    started = time.monotonic()
    statuses, parts = run_parts(commands, ["beside+", "first", "late", "never"], 8.0)
    assert time.monotonic() - started < 55
    assert statuses["first"] == "passed" and statuses["never"].startswith("not started")
    for name in ("beside", "late"):
        assert statuses[name].startswith("not finished after"), statuses
    assert has_ended(int(pid.read_text())) and list(parts) == [*commands]


@pytest.mark.parametrize("part", ["unknown", "tests=", "tests=1.5", "+tests"])
def test_a_part_that_is_not_one_is_refused_by_name(part):
    with pytest.raises(argparse.ArgumentTypeError, match="expected PART"):
        gpu_report.Part.of(part)
    assert gpu_report.Part.of("tests=165+") == ("tests", 165.0, True)


def test_the_extension_of_a_pack_is_taken_for_its_own_sources_only(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_build, "ROOT", tmp_path)
    compiled = []
    monkeypatch.setattr(gpu_build, "compile_extension", compiled.append)
    monkeypatch.setattr(gpu_build, "IMPORT", "")
    source, pack = tmp_path / "csrc" / "pack" / "pack_cpu.cpp", tmp_path / "pack"
    for folder in (source.parent, tmp_path / "hybridengine", pack):
        folder.mkdir(parents=True)
    source.write_text("one")
    (tmp_path / "CMakeLists.txt").touch()
    (pack / gpu_build.EXTENSION).write_text("built")
    (pack / "pack.json").write_text(json.dumps(gpu_build.described("90a")))
    monkeypatch.setenv("HYBRIDENGINE_PACK", str(pack))
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    gpu_build.main()
    assert not compiled and (tmp_path / "hybridengine" / gpu_build.EXTENSION).read_text() == "built"
    source.write_text("two")
    gpu_build.main()
    assert compiled == ["90a"]


def test_an_archive_is_unpacked_once_and_another_one_in_its_place(tmp_path):
    archive, folder = tmp_path / "pack.tar.xz", tmp_path / "pack"

    def unpacked(text: str) -> Path:
        (tmp_path / "file").write_text(text)
        with tarfile.open(archive, "w:xz") as file:
            file.add(tmp_path / "file", text)
        return gpu_report.unpack(archive, folder)

    assert (unpacked("one") / "one").read_text() == "one"
    (folder / "one").write_text("kept")
    assert (gpu_report.unpack(archive, folder) / "one").read_text() == "kept"
    assert (unpacked("two") / "two").is_file() and not (folder / "one").exists()


CALL = """
import sys
from tools import gpu_report
fake = ("-c", {part!r}, "passes")
gpu_report.ALL_PARTS = dict.fromkeys(gpu_report.ALL_PARTS, fake)
gpu_report.WORK = gpu_report.Path({work!r})
sys.argv = sys.argv[1:]
sys.exit(gpu_report.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit_s"), [("1", 380), ("2", 300)])
def test_a_call_runs_its_parts_and_leaves_rows_and_a_log(tmp_path, name, limit_s):
    code = tmp_path / "call.py"
    code.write_text(CALL.format(part=PART, work=str(tmp_path / "work")))
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')
    python.chmod(0o755)
    for archive in ("gpu-pack.tar.xz", "gpu-vllm.tar.xz"):
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "pack.json").write_text('{"commit": "c0ffee"}')
        with tarfile.open(tmp_path / archive, "w:xz") as file:
            file.add(tmp_path / "site", "site")
            file.add(tmp_path / "pack.json", "pack.json")
    out = tmp_path / "out"
    folders = {"PYTHON": str(python), "BUILD": str(tmp_path), "OUT": str(out)}
    root = gpu_report.ROOT
    script = root / "tools" / "gpu_calls" / f"{name}.sh"
    environment = os.environ | folders | {"PYTHONPATH": str(root)}
    command = ["bash", str(script), "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    log = (out / f"{name}.log").read_text()
    document = json.loads((out / f"{name}.json").read_text())
    assert log == done.stdout and document["commit"] == "c0ffee"
    words = re.findall(r"\b\w+=\d+\+?", script.read_text())
    wanted = [gpu_report.Part.of(word) for word in words]
    assert {part.name for part in wanted} == {*document["parts"]} and len(wanted) >= 5
    assert all(section["status"] == "passed" for section in document["parts"].values()), log
    assert f"LIMIT_S:={limit_s}" in script.read_text()


TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

def test_passes(): ...
def test_fails(): assert 1 == 2
def test_crashes(): os._exit(9)
@pytest.mark.skip(reason="not here")
def test_is_skipped(): ...
def test_leaves_a_bad_device(): raise RuntimeError("CUDA error: an illegal memory access")
def test_after_it(): ...
"""


@pytest.mark.slow
def test_gpu_tests_go_on_after_a_crash_and_have_a_row_each(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import a_package_that_is_not_here")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    file = tmp_path / "rows.json"
    command = [sys.executable, gpu_tests.__file__, "--json", str(file), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {r["test"].split("::")[-1]: r for r in json.loads(file.read_text())["rows"]}
    assert "a_package_that" in rows.pop("test_other.py")["message"]
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_crashes": "ended pytest with exit code 9",
        "test_is_skipped": "skipped",
        "test_leaves_a_bad_device": "failed",
        "test_after_it": "passed",
    }
    assert "assert 1 == 2" in rows["test_fails"]["message"]
    (tmp_path / "test_some.py").write_text(TESTS.replace("1 == 2", "1 == 1"))
    subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    resumed = {r["test"].split("::")[-1]: r for r in json.loads(file.read_text())["rows"]}
    assert resumed["test_fails"]["outcome"] == "passed" and len(resumed) == len(rows) + 1


SANITIZER = """#!/bin/sh
# compute-sanitizer for tests: finds errors in one file, and never ends on another.
case "$*" in
  *test_checksum.py*) echo "========= Invalid __global__ read of size 4"; exit 99;;
  *test_launch.py*) exec sleep 60;;
esac
"""


@pytest.mark.slow
def test_errors_that_the_sanitizer_finds_are_rows(tmp_path, monkeypatch):
    tool, file = tmp_path / "compute-sanitizer", tmp_path / "rows.json"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    tests = [f"tests/kernels/test_{name}.py" for name in ("balance", "checksum", "launch")]
    monkeypatch.setattr(gpu_sanitize, "test_files", lambda: tests)
    monkeypatch.setattr(gpu_sanitize, "TOOLS", ("memcheck",))
    monkeypatch.setattr(gpu_sanitize, "LIMIT_S", 2)
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize.py", "--json", str(file)])
    monkeypatch.setenv("PATH", "")
    assert gpu_sanitize.main() == 0
    assert json.loads(file.read_text())["rows"][0]["message"] == "it is not installed"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_sanitize.main() == 1
    rows = sorted(json.loads(file.read_text())["rows"], key=lambda row: row["test"])
    assert [row["outcome"] for row in rows] == ["passed", "failed", "not finished", "passed"]
    assert rows[3]["test"] == gpu_sanitize.PROBE, "one call of every operator"
    assert rows[1]["message"] == "========= Invalid __global__ read of size 4"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    assert gpu_sanitize.main() == 1, "what has not passed runs again"
    tested = sorted(row["test"] for row in json.loads(file.read_text())["rows"])
    assert tested == [*tests, gpu_sanitize.PROBE]
    assert len(gpu_sanitize.command_of("racecheck", "f", "tool")) > 5


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","forward_slices(LogProbForward)","gpu__time_duration.sum","ns","650,012"
"0","7","forward_slices(LogProbForward)","launch__registers_per_thread","register/thread","48"
"""


def test_metrics_of_a_profile_are_read():
    assert gpu_profile.parse(NCU) == {
        "function": "forward_slices(LogProbForward)",
        "gpu__time_duration.sum": "650,012 ns",
        "launch__registers_per_thread": "48 register/thread",
    }
    assert gpu_profile.parse("==ERROR== nothing was profiled") == {}
    command = gpu_profile.command_of("pack", "cuda", "ncu")
    assert command[0] == "ncu" and "move_kernel" in command
    assert command[command.index("--clock-control") + 1] == "none"


def test_the_functions_that_are_profiled_are_kernels():
    csrc = "".join(f.read_text() for f in (gpu_report.ROOT / "csrc").rglob("*.cu"))
    triton = "".join(f.read_text() for f in (gpu_report.ROOT / "kernels").rglob("triton*.py"))
    for function in gpu_profile.KERNELS.values():
        assert f" {function}(" in csrc or f"def {function}(" in triton, function


@pytest.mark.slow
def test_a_part_that_crashes_or_loses_the_gpu_goes_on_while_it_adds_rows(run):
    status, parts = run("kernels", "loses")
    assert status == "passed" and parts["kernels"]["rows"] == ["row 1", "row 2"]
    status, parts = run("step", "crashes")
    assert status == "exit code -6" and parts["step"]["rows"] == ["row 1"]


def test_an_archive_in_parts_gives_its_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    described = {"paths": ["a", "a/b"], "folders": {"CACHE": "cache"}, "values": {"ON": "1"}}
    (tmp_path / "environment.json").write_text(json.dumps(described))
    archive = tmp_path / "peers.tar.xz"
    with tarfile.open(archive, "w:xz") as file:
        file.add(tmp_path / "environment.json", "environment.json")
    data = archive.read_bytes()
    for index in range(2):
        part = data[index * (len(data) // 2) :][: len(data) // 2 + index]
        archive.with_name(f"peers.tar.xz.{index}").write_bytes(part)
    archive.unlink()
    environment = gpu_report.Environment(None, None, archive).of("kernels")
    folder = tmp_path / "work" / "peers"
    assert str(folder / "a" / "b") in environment["PYTHONPATH"].split(os.pathsep)
    assert environment["CACHE"] == str(folder / "cache") and environment["ON"] == "1"


def test_parts_with_vllm_find_it_on_a_gpu_only(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    archive = tmp_path / "vllm.tar.xz"
    with tarfile.open(archive, "w:xz") as file:
        file.add(__file__, "site/vllm.py")
    for on_gpu in (True, False):
        environment = gpu_report.Environment(None, archive, None, on_gpu)
        site = str(tmp_path / "work" / "vllm" / "site")
        found = [site in environment.of(part)["PYTHONPATH"] for part in ("vllm", "tests")]
        assert found == [on_gpu, False]


def test_a_call_goes_on_without_an_archive_that_is_broken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(b"no archive")
    environment = gpu_report.Environment(broken, broken, None)
    for part in ("tests", "rows"):
        assert "HYBRIDENGINE_PACK" not in environment.of(part)
    errors = capsys.readouterr().err
    assert "broken.tar.xz is left out: ReadError" in errors and "rows runs without vLLM" in errors


def test_a_second_call_needs_no_archives(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    pack = tmp_path / "pack.tar.xz"
    (tmp_path / "pack.json").write_text('{"commit": "c0ffee"}')
    with tarfile.open(pack, "w:xz") as file:
        file.add(tmp_path / "pack.json", "pack.json")
    for _ in range(2):
        environment = gpu_report.Environment(pack, None, None)
        assert environment.commit == "c0ffee"
        assert environment.of("tests")["HYBRIDENGINE_PACK"] == str(tmp_path / "work" / "pack")
        pack.unlink(missing_ok=True)


def test_parts_find_what_an_installation_registers(tmp_path):
    (found,) = distributions(path=[str(write_entry_points(tmp_path))])
    values = {(entry.group, entry.name): entry.value for entry in found.entry_points}
    assert values["hybridengine.compilers", "torch"] == "hybridengine.compile"
    assert values["hybridengine.engines", "hf"] == "hybridengine.hf.engine:HfEngine"
    assert found.name == "hybridengine"


def test_tests_that_never_passed_on_a_gpu_come_first():
    tests = ["tests/kernels/test_layer.py::a", "tests/kernels/sampling/test_b.py::b"]
    tests += ["tests/model/test_exact_c.py::c", "tests/kernels/test_grouped_linear.py::d"]
    assert sorted(tests, key=gpu_tests.comes_later) == [*tests[1:], tests[0]]
    assert all((gpu_report.ROOT / path).exists() for path in (*gpu_tests.RANKS, *gpu_tests.FOLDERS))
