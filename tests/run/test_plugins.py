"""Parts that installed packages register."""

from importlib.metadata import EntryPoint

import pytest

from hybridengine import run
from hybridengine.run.errors import ConfigError

GROUP = "hybridengine.somewhere"


@pytest.fixture
def registered(monkeypatch):
    """Entry points in the place of those that are installed."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(run, "entry_points", lambda group: [x for x in entries if x.group == group])
    run.plugins.cache_clear()
    yield entries
    run.plugins.cache_clear()


def test_a_part_is_imported_when_it_is_asked_for(registered):
    registered += [
        EntryPoint("join", "os.path:join", GROUP),
        EntryPoint("broken", "no_such_module:x", GROUP),
        EntryPoint("join", "os.path:split", "hybridengine.elsewhere"),
    ]
    assert list(run.plugins("somewhere")) == ["broken", "join"]
    assert run.load_plugin("somewhere", "join", "a.key")("a", "b") == "a/b"


def test_a_part_that_is_missing_is_named(registered):
    registered.append(EntryPoint("join", "os.path:join", GROUP))
    expected = r"a\.key needs `other`, .* hybridengine\.somewhere; registered are: join"
    with pytest.raises(ConfigError, match=expected):
        run.load_plugin("somewhere", "other", "a.key")


def test_one_name_for_two_parts_is_refused(registered):
    registered += [EntryPoint("join", "os.path:join", GROUP)] * 2  # an old installation's leftovers
    assert len(run.plugins("somewhere")) == 1
    run.plugins.cache_clear()
    registered.append(EntryPoint("join", "os.path:split", GROUP))
    with pytest.raises(ConfigError, match="two installed packages register `join`"):
        run.plugins("somewhere")
