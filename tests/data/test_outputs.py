from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import __version__
from batchrun.config import InputConfig, OutputConfig
from batchrun.data.outputs import ATTEMPTS, RESULT_TYPES, SAMPLE, OutputSchema, RowResult
from batchrun.data.plan import Chunk
from batchrun.data.sources import open_source
from batchrun.data.store import Store
from batchrun.errors import InputError

FINGERPRINT = "f" * 64
OK = RowResult("good", "stop", prompt_tokens=7, cached_tokens=4, completion_tokens=1, total_s=0.5, run="run1")
# Where rows have one sample and are asked once.
ADDED = {key: type for key, type in RESULT_TYPES.items() if key not in (SAMPLE, ATTEMPTS)}
BAD = RowResult(None, "error", "error", "prompt_too_long", "99 tokens", prompt_tokens=99)

TYPED = pa.table(
    {
        "int": pa.array([1, None, 2**63 - 1], pa.int64()),
        "ns": pa.array([1_700_000_000_123_456_789, None, 0], pa.timestamp("ns")),
        "zoned": pa.array([1, None, 2], pa.timestamp("us", "Europe/Paris")),
        "date": pa.array([datetime.date(2024, 2, 29), None, datetime.date(1, 1, 1)]),
        "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-9.99")], pa.decimal128(38, 2)),
        "category": pa.array(["x", None, "x"]).dictionary_encode(),
        "items": pa.array(
            [[{"a": 1, "b": "é"}], None, []], pa.list_(pa.struct([("a", pa.int8()), ("b", pa.string())]))
        ),
        "map": pa.array([[("k", 1.5)], None, []], pa.map_(pa.string(), pa.float32())),
        "large": pa.array(["t", None, ""], pa.large_string()),
        "binary": pa.array([b"\x00\xff", None, b""]),
        "half": pa.array([1.5, None, 2.5], pa.float16()),
        "nothing": pa.nulls(3),
    }
)


def made(schema: pa.Schema, **config: Any) -> OutputSchema:
    return OutputSchema(OutputConfig(**config), schema, FINGERPRINT)


def refusal(schema: pa.Schema, **config: Any) -> str:
    with pytest.raises(InputError) as caught:
        made(schema, **config)
    return str(caught.value)


def test_schema_is_declared_without_rows() -> None:
    schema = made(pa.schema([("id", pa.int64()), pa.field("text", pa.string(), nullable=False)])).schema
    assert schema.names[:2] == ["id", "text"]
    assert not schema.field("text").nullable
    assert {name: schema.field(name).type for name in ADDED} == ADDED
    assert schema.field("error").type == pa.string()
    assert schema.field("source_row").type == pa.int64()


def test_names_follow_prefix_and_completion() -> None:
    names = made(pa.schema([("status", pa.string())]), prefix="llm_", completion="label").schema.names
    assert names[:3] == ["status", "llm_label", "llm_finish_reason"]
    assert all(name.startswith("llm_") for name in names[1:])


def test_kept_columns_in_the_order_asked() -> None:
    schema = pa.schema([("a", pa.int8()), ("b", pa.int8()), ("c", pa.int8())])
    assert made(schema, columns=["c", "a"]).kept == ["c", "a"]
    assert made(schema, columns=[]).schema.names == list(ADDED)


def test_collisions_and_missing_columns_are_refused() -> None:
    taken = pa.schema([("completion", pa.string()), ("error", pa.string()), ("text", pa.string())])
    message = refusal(taken)
    for word in ("completion, error", "output.prefix", "output.completion", "output.columns"):
        assert word in message
    assert made(taken, columns=["text"]).kept == ["text"]
    assert "names title" in refusal(taken, columns=["text", "title"], prefix="x_")
    assert "output.completion=status" in refusal(pa.schema([]), completion="status")


@pytest.mark.parametrize("type", [pa.struct([]), pa.list_(pa.struct([])), pa.month_day_nano_interval()])
def test_types_that_parquet_cannot_hold_are_named(type: pa.DataType) -> None:
    schema = pa.schema([("text", pa.string()), ("tools", type)])
    assert "column tools of type" in refusal(schema)
    assert made(schema, columns=["text"]).kept == ["text"]


def test_table_golden() -> None:
    batches = pa.table({"id": [7, 8, 9]}).to_batches(max_chunksize=2)
    output = made(batches[0].schema)
    table = output.table(batches, Chunk(2, 1, 100, 103), "in/a.parquet", [OK, BAD, RowResult("")])
    plain = ["queue_s", "first_token_s", "total_s", "truncated_tokens", "deduplicated"]
    assert table.drop_columns(plain).to_pydict() == {
        "id": [7, 8, 9],
        "completion": ["good", None, ""],
        "finish_reason": ["stop", "error", None],
        "status": ["ok", "error", "ok"],
        "error_type": [None, "prompt_too_long", None],
        "error": [None, "99 tokens", None],
        "prompt_tokens": [7, 99, 0],
        "cached_tokens": [4, 0, 0],
        "completion_tokens": [1, 0, 0],
        "max_tokens": [None, None, None],
        "source_file": ["in/a.parquet"] * 3,
        "source_row": [100, 101, 102],
        "run": ["run1", None, None],
    }
    assert table.column("total_s").to_pylist() == [0.5, 0.0, 0.0]
    assert table.schema.equals(output.schema)
    footer = table.schema.metadata
    assert footer[b"batchrun.version"] == __version__.encode()
    assert footer[b"batchrun.fingerprint"] == FINGERPRINT.encode()
    assert json.loads(footer[b"batchrun.chunk"]) == {"file": 2, "index": 1, "start": 100, "stop": 103}
    assert footer[b"batchrun.source"] == b"in/a.parquet"


def test_table_of_a_table_and_of_no_rows() -> None:
    output = made(pa.schema([("id", pa.int64())]))
    assert output.table(pa.table({"x": [0], "id": [5]}), Chunk(0, 0, 0, 1), "a", [OK]).column("id").to_pylist() == [5]
    assert output.table([], Chunk(0, 0, 0, 0), "a", []).schema.equals(output.schema)


def test_samples_of_a_row_stand_side_by_side_behind_its_columns() -> None:
    output = OutputSchema(OutputConfig(prefix="p_"), pa.schema([("id", pa.int64())]), FINGERPRINT, samples=2)
    assert output.names["sample"] == "p_sample"
    results = [RowResult(f"{row}{sample}", "stop", sample=sample) for row in (0, 1, 2) for sample in (0, 1)]
    batches = pa.table({"id": [7, 8, 9]}).to_batches(max_chunksize=2)
    chunk = Chunk(0, 1, 10, 13, samples=2)
    table = output.table(batches, chunk, "a", results)
    assert table.schema.equals(output.schema)
    assert table["id"].to_pylist() == [7, 7, 8, 8, 9, 9]
    assert table["p_source_row"].to_pylist() == [10, 10, 11, 11, 12, 12]
    assert table["p_sample"].to_pylist() == [0, 1] * 3
    assert table["p_completion"].to_pylist() == ["00", "01", "10", "11", "20", "21"]
    assert output.results(table) == results
    with pytest.raises(ValueError, match="got 3 input rows and 5 results"):
        output.table(batches, chunk, "a", results[:5])


def test_no_input_column_kept() -> None:
    table = made(pa.schema([("id", pa.int64())]), columns=[]).table(
        pa.table({"id": [1, 2]}).to_batches(), Chunk(0, 0, 0, 2), "a", [OK, BAD]
    )
    assert table.num_rows == 2
    assert "id" not in table.column_names


@pytest.mark.parametrize(("rows", "results"), [(1, 2), (2, 1), (3, 3)])
def test_wrong_number_of_rows(rows: int, results: int) -> None:
    output = made(pa.schema([("id", pa.int64())]))
    with pytest.raises(ValueError, match=f"got {rows} input rows and {results} results"):
        output.table(pa.table({"id": range(rows)}), Chunk(0, 0, 0, 2), "a", [OK] * results)


def test_lone_surrogates_are_replaced() -> None:
    result = RowResult("a\ud835", "stop", error="\udc00")
    table = made(pa.schema([("id", pa.int64())])).table(pa.table({"id": [1]}), Chunk(0, 0, 0, 1), "a", [result])
    assert table.column("completion").to_pylist() == ["a\ufffd"]
    assert table.column("error").to_pylist() == ["\ufffd"]


def write_part(folder: Path, table: pa.Table, results: list[RowResult] | None = None, **config: Any) -> Path:
    """From an input file to a committed part, as a job does it."""
    path = folder / "in.parquet"
    pq.write_table(table, path)
    source = open_source(InputConfig(path=str(path)))
    output = made(source.schema, **config)
    chunk = Chunk(0, 0, 0, table.num_rows)
    batches = [batch for _, batch in source.read(source.files[0], [(0, chunk.stop)])]
    part = output.table(batches, chunk, "in.parquet", results or [OK] * table.num_rows)
    return Store(folder / "out", FINGERPRINT).commit(chunk, part)


@pytest.mark.parametrize("column", TYPED.column_names)
def test_each_type_comes_back_equal(tmp_path: Path, column: str) -> None:
    part = write_part(tmp_path, TYPED.select([column]))
    before, after = pq.read_table(tmp_path / "in.parquet"), pq.read_table(part)
    assert after.schema.field(column).equals(before.schema.field(column))
    assert after.column(column).equals(before.column(column))
    assert after.schema.field(column).type == TYPED.schema.field(column).type


def test_types_without_an_arrow_schema_in_the_file(tmp_path: Path) -> None:
    table = TYPED.select(["ns", "items", "map", "decimal"])
    pq.write_table(table, tmp_path / "in.parquet", store_schema=False, use_deprecated_int96_timestamps=True)
    source = open_source(InputConfig(path=str(tmp_path)))
    chunk = Chunk(0, 0, 0, 3)
    batches = [batch for _, batch in source.read(source.files[0], [(0, 3)])]
    part = Store(tmp_path / "out", FINGERPRINT).commit(
        chunk, made(source.schema).table(batches, chunk, "in.parquet", [OK] * 3)
    )
    assert pq.read_table(part).select(table.column_names).equals(pq.read_table(tmp_path / "in.parquet"))


def test_field_ids_of_other_writers_do_not_matter(tmp_path: Path) -> None:
    field = pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "7"})
    part = write_part(tmp_path, pa.table({"id": [1]}, schema=pa.schema([field])))
    assert pq.read_table(part).column("id").to_pylist() == [1]


def test_all_null_columns_have_the_same_schema_as_full_ones(tmp_path: Path) -> None:
    for name, result in {"ok": OK, "bad": BAD}.items():
        (tmp_path / name).mkdir()
        write_part(tmp_path / name, pa.table({"id": [1]}), [result])
    schemas = [pq.read_schema(tmp_path / name / "out/part-00000-000000.parquet") for name in ("ok", "bad")]
    assert schemas[0].equals(schemas[1])


def test_hugging_face_features_survive(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
            "drop": datasets.Value("int8"),
        }
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1], "drop": [1, 2]}, features=features)
    write_part(tmp_path, data.data.table, [OK, BAD], columns=["label", "text"])
    stored = pq.read_schema(tmp_path / "out/part-00000-000000.parquet")
    described = json.loads(stored.metadata[b"huggingface"])["info"]["features"]
    assert list(described) == stored.names
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.features["label"] == features["label"]
    assert "drop" not in loaded.features
    assert loaded.features["completion"] == datasets.Value("string")
    assert loaded.features["total_s"] == datasets.Value("float32")
    assert loaded["completion"][:] == ["good", None]


@pytest.mark.parametrize("metadata", ["not json", "{}", "[]", '{"info": {"features": null}}'])
def test_unreadable_features_are_dropped(metadata: str) -> None:
    schema = pa.schema([("id", pa.int64())], {"huggingface": metadata, "pandas": "{}"})
    assert made(schema).schema.metadata == {b"pandas": b"{}"}


def test_an_output_can_be_an_input(tmp_path: Path) -> None:
    write_part(tmp_path, pa.table({"id": [1]}))
    source = open_source(InputConfig(path=str(tmp_path / "out")))
    assert [file.name for file in source.files] == ["part-00000-000000.parquet"]
    schema = made(source.schema, prefix="second_").schema
    assert not any(key.startswith(b"batchrun.") for key in schema.metadata or {})
