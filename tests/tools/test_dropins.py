"""The run of other packages' tests with ours in place, without installing one."""

import importlib.metadata
import json
import sys
import types
from pathlib import Path

import pytest

from hybridengine.integrations._patching import Patches
from tools import dropins, dropins_plugin

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="t1"/>
<testcase classname="tests.a" name="t2"><failure message="no"/></testcase>
<testcase classname="tests.a" name="t3"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="t4"/>
</testsuite></testsuites>"""


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The row of a package whose tests end as given, without and with ours."""

    def run(without, calls=None, untested=None):
        results = iter([(without, {}), (dropins.outcomes_of(report), calls or {"p.f": 2})])
        upstream = dropins.Upstream(("p==1",), "p==1", (), untested=untested or {})
        monkeypatch.setattr(dropins, "CACHE", tmp_path)
        monkeypatch.setattr(dropins, "overlay", lambda *_: tmp_path)
        monkeypatch.setattr(dropins, "run_pytest", lambda *_: next(results))
        monkeypatch.setitem(dropins.UPSTREAMS, "p", upstream)
        source, out = tmp_path / "given", tmp_path / "out.json"
        source.mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["dropins", "p", f"--source=p={source}", f"--json={out}"])
        return dropins.main(), json.loads(out.read_text())["rows"][0]

    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    return run


def test_a_test_that_passes_only_without_ours_is_a_fault(ran, capsys):
    everything = {f"tests.{name}": "passed" for name in ("a::t1", "b::t4")}
    assert ran(everything | {"tests.a::t2": "failed"})[0] == 0
    code, row = ran(everything | {"tests.a::t2": "passed", "tests.c::gone": "passed"})
    assert code == 1
    assert row["broken"] == ["tests.a::t2", "tests.c::gone"]
    assert (row["passed"], row["failed"], row["skipped"]) == (2, 1, 1)
    assert "passes only without ours: tests.a::t2" in capsys.readouterr().err


def test_a_function_that_no_test_calls_is_a_fault_without_a_reason(ran):
    code, row = ran({}, calls={"p.f": 1, "p.g": 0})
    assert (code, row["never_called"]) == (1, ["p.g"])
    assert ran({}, calls={"p.f": 1, "p.g": 0}, untested={"p.g": "needs a GPU"})[0] == 0


def test_tests_that_do_not_end_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(dropins, "TIMEOUT_S", 0.1)
    upstream, source = dropins.Upstream(("p==1",), "p==1", ()), tmp_path / "p" / "source"
    source.mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"p: its tests without ours did not end within .* 0\.1 s"):
        dropins.run_pytest(Path(sys.executable), source, upstream, {})
    assert (tmp_path / "p" / "without.log").is_file()


def test_the_plugin_counts_calls(monkeypatch, tmp_path):
    host = types.ModuleType("dropinhost")
    exec("def f(x): return x\nclass C:\n    @staticmethod\n    def s(x): return x", vars(host))
    monkeypatch.setitem(sys.modules, "dropinhost", host)
    adapter = types.ModuleType("hybridengine.integrations.dropinhost")
    ours = {"f": lambda x: ("ours", x), "C.s": staticmethod(lambda x: ("ours", x))}
    patches = Patches("dropinhost", {"all": ours}, distribution="packaging")
    adapter.patch = patches.patch
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    monkeypatch.setenv("HYBRIDENGINE_DROPIN", "dropinhost")
    monkeypatch.setenv("HYBRIDENGINE_DROPIN_CALLS", str(tmp_path / "calls.json"))
    monkeypatch.setattr(dropins_plugin, "CALLS", {})
    dropins_plugin.pytest_configure()
    assert host.f(1) == host.f(1) == host.C.s(1) == ("ours", 1)
    dropins_plugin.pytest_unconfigure()
    patches.unpatch()
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert calls == {"dropinhost.f": 2, "dropinhost.C.s": 1}


def test_a_source_tree_has_the_version_of_its_release(monkeypatch, tmp_path):
    dropins.write_metadata(tmp_path, ("drop-in-host==1.2.3",))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("drop-in-host") == "1.2.3"
