"""The table of releases on which our patches were tried."""

import re

import pytest

from tools import peers

REFUSED = "host.losses.loss of host 2.0: expected a signature whose calls fit (x), found (x, y)."


def test_a_row_names_what_fits_and_what_is_refused():
    found = {
        "3.0": {"losses": [], "head": []},
        "2.0": {"losses": [REFUSED], "head": []},
        "1.0": {"losses": ["not tried: No module named 'ray'"], "head": []},
    }
    assert peers.row("liger", found) == (
        "| liger | 3.0 | 2.0 without `losses` (loss); "
        "1.0 without `losses` (not tried: it lacks a package) |"
    )
    assert peers.row("skyrl", {}).startswith("| skyrl | - | 0.5 is not available to try |")
    assert peers.refusals([REFUSED, "not tried: x"]) == [REFUSED]


def test_the_page_keeps_what_is_around_the_table():
    text = "a\n<!-- peers -->\n| x |\n|---|\n| host |\n<!-- /peers -->\nb\n"
    before, rows, after = peers.parts(text)
    assert rows == ["| host |"]
    assert before + "| host |\n" + after == text
    with pytest.raises(SystemExit, match="has no <!-- peers -->"):
        peers.parts("a\n")


def test_the_page_has_a_row_of_every_package_in_the_form_that_is_written():
    _, rows, _ = peers.parts(peers.PAGE.read_text())
    assert [row.split(" ", 2)[1] for row in rows] == sorted(peers.PEERS)
    release = r"[\d.]+"
    refused = rf"{release} without `\w+` \([^)]+\)(, `\w+` \([^)]+\))*"
    other = rf"({refused}|{release} is not available to try)"
    for row in rows:
        assert re.fullmatch(
            rf"\| \w+ \| (-|{release}(, {release})*) \| (-|{other}(; {other})*) \|", row
        ), row


def test_a_release_is_checked_in_front_of_the_installed_one(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a stand-in')\n")
    assert peers.check("transformers", tmp_path) == {
        "import": ["not tried: ImportError: a stand-in"]
    }
