"""Every type of a column in parquet and Arrow files has a defined value, or is refused by name."""

import datetime
import random
import uuid
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridengine.run.config import DataConfig
from hybridengine.train.data import DataError, PromptDataset
from hybridengine.train.data.files import read_files
from tests.train.data.rows import row, write_jsonl

MOMENT = datetime.datetime(2026, 2, 3, 4, 5, 6, 789)
UTC = MOMENT.replace(tzinfo=datetime.UTC)
IDENTITY = uuid.UUID(int=7)


def read(path) -> list[dict]:
    return [row for _, row in read_files(str(path))]


def json_array(*texts, storage=None):
    return pa.ExtensionArray.from_storage(
        pa.json_(storage or pa.string()), pa.array(texts, storage or pa.string())
    )


def in_list(array) -> pa.Array:
    return pa.ListArray.from_arrays([0, len(array)], array)


VALUES = {
    "json": (json_array('{"a": [1, null], "b": {"c": 0.5}}'), {"a": [1, None], "b": {"c": 0.5}}),
    "json null": (json_array(None), None),
    "large json": (json_array("[1]", storage=pa.large_string()), [1]),
    "json in list": (in_list(json_array('"x"', "null", None)), ["x", None, None]),
    "json in struct": (
        pa.StructArray.from_arrays([json_array('{"k": 1}'), pa.array([2])], ["j", "n"]),
        {"j": {"k": 1}, "n": 2},
    ),
    "decimal": (pa.array([Decimal("1.50")]), Decimal("1.50")),
    "decimal256": (pa.array([Decimal("1.50")], pa.decimal256(50, 2)), Decimal("1.50")),
    "timestamp s": (pa.array([0], pa.timestamp("s")), datetime.datetime(1970, 1, 1)),
    "timestamp us": (pa.array([MOMENT], pa.timestamp("us")), MOMENT),
    "timestamp ns": (pa.array([MOMENT], pa.timestamp("ns")), MOMENT),
    "timestamp tz": (pa.array([UTC], pa.timestamp("ns", "UTC")), UTC),
    "ns in list": (in_list(pa.array([MOMENT], pa.timestamp("ns"))), [MOMENT]),
    "date": (pa.array([MOMENT.date()], pa.date32()), MOMENT.date()),
    "date64": (pa.array([MOMENT.date()], pa.date64()), MOMENT.date()),
    "time": (pa.array([MOMENT.time()], pa.time64("ns")), MOMENT.time()),
    "duration": (
        pa.array([datetime.timedelta(1, 2, 3)], pa.duration("ns")),
        datetime.timedelta(1, 2, 3),
    ),
    "uuid": (pa.array([IDENTITY.bytes], pa.uuid()), IDENTITY),
    "half": (pa.array([1.5], pa.float16()), 1.5),
    "fixed list": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
    "large list": (pa.array([[1, 2]], pa.large_list(pa.int8())), [1, 2]),
    "fixed bytes": (pa.array([b"ab"], pa.binary(2)), b"ab"),
    "large text": (pa.array(["é"], pa.large_string()), "é"),
    "text view": (pa.array(["é"], pa.string_view()), "é"),
    "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
    "dictionary in list": (in_list(pa.array(["x", "y"]).dictionary_encode()), ["x", "y"]),
    "map": (
        pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int8())),
        {"a": 1, "b": None},
    ),
    "null": (pa.array([None]), None),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_value_of_every_type(tmp_path, name):
    array, expected = VALUES[name]
    table = pa.table({"n": pa.array([1]), "x": array})
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with (
        pa.OSFile(str(tmp_path / "c.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    for file in ("a.parquet", "b.arrow", "c.arrow"):
        [found] = read(tmp_path / file)
        assert found == {"n": 1, "x": expected}
        assert type(found["x"]) is type(expected) or isinstance(expected, dict)


REFUSED = {
    "a map with numbers as keys": (
        pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())),
        "has a map whose keys are not texts, map<int8",
    ),
    "a map with a key twice": (
        pa.array([[("a", 2), ("a", 3)]], pa.map_(pa.string(), pa.int8())),
        "has a value that Python cannot hold: .*duplicate key was 'a'",
    ),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), "of type timestamp.ns., has a value that"),
    "nanoseconds of a time": (pa.array([1], pa.time64("ns")), "has a value that Python cannot"),
    "the year 10000": (pa.array([10**12], pa.timestamp("s")), "has a value that Python cannot"),
    "bad json": (json_array("{"), "is not JSON"),
    "a key twice": (json_array('{"a": 1, "a": 2}'), "has the key 'a' twice"),
    "bad text": (
        pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()),
        "has text that is not UTF-8",
    ),
    "a tensor": (
        pa.FixedShapeTensorArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [2]), pa.array([[1, 2]], pa.list_(pa.int8(), 2))
        ),
        "has the extension type 'arrow.fixed_shape_tensor'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_column(tmp_path, name):
    array, message = REFUSED[name]
    pq.write_table(pa.table({"n": pa.array([1]), "the x": array}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet.*column 'the x'.*{message}"):
        read(tmp_path / "a.parquet")


def test_an_extension_type_that_is_not_known_here(tmp_path):
    """Arrow reads it as its storage; the metadata of the field has the name."""
    field = pa.field("x", pa.int8(), metadata={"ARROW:extension:name": "geo.point"})
    schema = pa.schema([pa.field("in", pa.list_(field))])
    pq.write_table(pa.Table.from_pylist([{"in": [1]}], schema), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'in' has the extension type 'geo\.point'"):
        read(tmp_path / "a.parquet")


def test_json_columns_of_datasets_reach_rewards_as_values(tokenizer, tmp_path):
    """As `Dataset.to_parquet` and `save_to_disk` write `datasets.Json`."""
    datasets = pytest.importorskip("datasets")
    truth = {"answers": [1, {"unit": None}], "tolerance": 0.5}
    rows = row(reward_model={"style": "rule", "ground_truth": truth})
    features = datasets.Features(
        {
            "data_source": datasets.Value("string"),
            "prompt": datasets.List(datasets.Json()),
            "reward_model": {"ground_truth": datasets.Json(), "style": datasets.Value("string")},
            "grid": datasets.Array2D((2, 1), "int64"),
        }
    )
    own = {name: [rows[name]] for name in ("data_source", "prompt", "reward_model")}
    table = datasets.Dataset.from_dict({**own, "grid": [[[1], [2]]]}, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for source in ("a.parquet", "saved"):
        [found] = read(tmp_path / source)
        assert found["grid"] == [[1], [2]]
        for _ in range(2):  # made, then from the cache
            [sample] = PromptDataset(str(tmp_path / source), tokenizer, DataConfig())
            assert sample.ground_truth == truth == table[0]["reward_model"]["ground_truth"]
            assert sample.chat == rows["prompt"]


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": list(range(10))})
    table.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert [row["n"] for row in read(tmp_path / "one")] == list(range(10))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    assert len(read(tmp_path / "splits" / "test")) == 10
    with pytest.raises(DataError, match=r"splits of a saved dataset; name .*splits/test, .*train"):
        read(tmp_path / "splits")
    next((tmp_path / "one").glob("data-00001*")).unlink()
    with pytest.raises(DataError, match="no complete saved dataset"):
        read(tmp_path / "one")
    write_jsonl(tmp_path / "state.json", [{"n": 1}])  # a name alone makes no saved dataset
    assert read(tmp_path / "state.json") == [{"n": 1}]


def test_json_in_lists_that_only_arrow_files_have(tmp_path):
    views = pa.ListViewArray.from_arrays([0], [1], json_array('{"a": null}'))
    table = pa.table({"x": views})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert read(tmp_path / "a.arrow") == [{"x": [{"a": None}]}]


def test_a_damaged_arrow_file_is_an_error_or_other_rows(tmp_path):
    """Arrow maps offsets as they are in the file; one outside of it would end the process."""
    rows = [{"text": "abc" * n, "list": ["x"] * n, "more": {"n": n}} for n in range(20)]
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    content, draw, refused = (tmp_path / "a.arrow").read_bytes(), random.Random(51), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (tmp_path / "a.arrow").write_bytes(damaged)
        try:
            read(tmp_path / "a.arrow")
        except DataError:
            refused += 1
    assert refused > 30
