"""Reading data files: all formats give the same rows, every error names file and row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.train.data import DataError
from hybridengine.train.data.files import data_files, read_files

ROWS = [{"a": 1, "b": "é\u2028\n"}, {"a": 2, "b": "𝄞"}]


def as_lines(rows, **options) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


def read(path):
    return [row for _, row in read_files(str(path))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_lines(ROWS)),
        ("a.jsonl", as_lines(ROWS, ensure_ascii=False)),
        ("a.jsonl", as_lines(ROWS).replace(b"\n", b"\r\n")),
        ("a.jsonl", b"\n \n" + as_lines(ROWS).strip()),
        ("a.jsonl", b"\xef\xbb\xbf" + as_lines(ROWS)),
        ("a.json", as_lines(ROWS)),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", b"\n\n" + json.dumps(ROWS, indent=2).encode()),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("a.jsonl.gz", gzip.compress(as_lines(ROWS), mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.json.gz", gzip.compress(as_lines(ROWS), mtime=0)),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == ROWS


def test_parquet_gives_the_same_rows(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ROWS
    many = [{"n": n} for n in range(3000)]  # more than one batch
    pq.write_table(pa.Table.from_pylist(many), tmp_path / "b.parquet")
    rows = list(read_files(str(tmp_path / "b.parquet")))
    assert [row for _, row in rows] == many
    assert rows[2999][0].endswith("b.parquet, row 2999")


def test_folders_and_globs_are_sorted_by_name(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.json", "sub/c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"n": name}))
    (tmp_path / "README.md").write_text("no data")
    every = [{"n": name} for name in ("a.json", "b.jsonl", "sub/c.jsonl")]
    assert read(tmp_path) == every
    assert read(tmp_path / "*.json*") == every[:2]
    assert read(tmp_path / "**" / "*.jsonl") == every[1:]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/sub") == every[2:]
    odd = tmp_path / "sub" / "x[1].jsonl"  # a name that looks like a glob
    odd.write_text('{"n": "odd"}')
    assert read(odd) == [{"n": "odd"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", r"none\.jsonl does not exist; check the path"),
        ("none*.jsonl", r"none\*\.jsonl matches no file; check the path"),
        ("empty", r"data folder .*empty holds no \.parquet, .*\.jsonl, .* file"),
        ("*.csv", r"a\.csv ends in '\.csv', expected \.parquet"),
    ],
)
def test_names_without_a_file(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("a\n")
    with pytest.raises(DataError, match=message):
        data_files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": "\\ud83d"}', r"line 2 has '\\ud83d', half of a surrogate"),
        ("a.jsonl", b'{"a": {"\\uDC00": 1}}', r"line 1 has '\\udc00', half of a surrogate"),
        ("a.json", b'[{"a": "\\ud83d"}]', r"a\.json has '\\ud83d', half of a surrogate"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, "line 1 has more than 100 nested lists"),
        ("a.jsonl", b'{"a":' * 150 + b"1" + b"}" * 150, "line 1 has more than 100 nested lists"),
        ("a.jsonl", b'{"a": 1, "b": {"c": 1, "c": 2}}', "line 1 .* has the key 'c' twice"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": "\x00"}', "line 1 is not JSON: Invalid control character"),
        ("a.jsonl", b'{"a": 1}\n\x00\x00\x00', "line 2 is not JSON"),
        ("a.jsonl", b'{"a": "\xe9"}', "line 1 is not UTF-8: .*byte 0xe9"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "line 1 is not UTF-8"),
        ("a.json", b'[{"a": 1}, 2]', "a.json, item 1 is a JSON int, expected an object"),
        ("a.json", b'[{"a": 1}', "a.json is not JSON"),
        ("a.json", b"[]", "the data file is empty"),
        ("a.json", b'{\n "a": 1\n}', "line 1 is not JSON"),
        ("a.jsonl.gz", b'{"a": 1}', "a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "gz cannot be read: "),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "the data file is empty"),
    ],
)
def test_malformed_json_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path / name)
    assert len(str(error.value)) < 500


def test_malformed_parquet_files(tmp_path):
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"\xff"]).buffers())
    pq.write_table(pa.table({"a": bad}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 0 or later: .*text that is not UTF"):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has the column 'a' twice"):
        read(tmp_path / "b.parquet")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=5))
def test_any_rows_are_read_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_bytes(as_lines(rows))
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert read(folder) == rows + rows
