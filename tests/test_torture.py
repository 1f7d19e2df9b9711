"""The torture table through whole jobs: every type comes out as it went in, or is refused before any work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchrun import runner
from batchrun.data.merge import merge_parts
from batchrun.data.store import Store
from batchrun.errors import ConfigError, InputError
from tests import torture
from tests.engine.families import make_model
from tests.fake import FakeEngine
from tests.test_runner import job


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda *_: FakeEngine())


# What has no type of its own in Parquet, or in Arrow's kernels for single rows, and what holds its values.
OTHER_TYPES = {"ts_s": pa.timestamp("ms"), "string_view": pa.string()}
UNION = pa.UnionArray.from_sparse(pa.array([0] * 4, pa.int8()), [pa.array(range(4))])


def carried(output: Path, names: list[str]) -> pa.Table:
    parts = sorted(output.glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts]).select(names).combine_chunks()


def check_equal(found: pa.Table, made: pa.Table) -> None:
    for name in made.column_names:
        expected = made[name].combine_chunks()
        expected = expected.cast(OTHER_TYPES.get(name, expected.type))
        assert found.schema.field(name).type == expected.type, name
        values = found[name].combine_chunks()
        if isinstance(expected.type, pa.DictionaryType):
            values, expected = values.dictionary_decode(), expected.dictionary_decode()
        assert values.equals(expected), name


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_every_type_is_carried_over_a_resume_and_a_merge(tiny: Path, tmp_path: Path, name: str) -> None:
    made = torture.table()
    source = torture.write(tmp_path / name, made)
    config = job(tiny, source, tmp_path / "out", output__chunk_rows=20)
    assert runner.run(config) == 0
    check_equal(carried(tmp_path / "out", made.column_names), made)
    before = carried(tmp_path / "out", [*made.column_names, "completion", "source_row"])
    (tmp_path / "out" / "part-00000-000001.parquet").unlink()
    (tmp_path / "out" / "part-00000-000003.parquet").write_bytes(b"torn")
    assert runner.run(config) == 0
    after = carried(tmp_path / "out", before.column_names)
    assert after.schema.equals(before.schema)
    check_equal(after, made)
    schemas = {pq.read_schema(part).remove_metadata().to_string() for part in (tmp_path / "out").glob("part-*")}
    assert len(schemas) == 1
    merge_parts(tmp_path / "out", tmp_path / "merged", 64, "zstd")
    (merged,) = (tmp_path / "merged").glob("*.parquet")
    check_equal(pq.read_table(merged), made)
    assert {pq.read_schema(merged).remove_metadata().to_string()} == schemas


def test_every_type_is_carried_beside_each_sample(tiny: Path, tmp_path: Path) -> None:
    made = torture.table()
    source = torture.write(tmp_path / "in.parquet", made)
    config = job(tiny, source, tmp_path / "out", output__chunk_rows=20, sampling__n=2, sampling__temperature=1.0)
    assert runner.run(config) == 0
    found = carried(tmp_path / "out", [*made.column_names, "sample"])
    assert found["sample"].to_pylist() == [0, 1] * 64
    for sample in (0, 1):
        check_equal(found.filter(pc.equal(found["sample"], sample)), made)


def test_every_type_can_be_filtered(tiny: Path, tmp_path: Path) -> None:
    made = torture.table()
    source = torture.write(tmp_path / "in.parquet", made)
    runner.run(job(tiny, source, tmp_path / "out", input__filter="int64 == 1", output__chunk_rows=5))
    found, rows = carried(tmp_path / "out", made.column_names), range(0, 64, 5)
    check_equal(found, pa.concat_tables([made.slice(row, 1) for row in rows]).combine_chunks())
    assert carried(tmp_path / "out", ["source_row"])["source_row"].to_pylist() == list(range(0, 64, 5))


def test_readers_take_the_folder_while_the_job_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_dataset

    made = torture.with_features(torture.table(without=torture.NOT_IN_DATASETS))
    source = torture.write(tmp_path / "in.parquet", made)
    seen: list[int] = []
    commit = Store.commit

    def read_after(self: Store, chunk: Any, table: pa.Table) -> Path:
        path = commit(self, chunk, table)
        rows = ds.dataset(tmp_path / "out").to_table().num_rows
        cache = str(tmp_path / f"cache-{len(seen)}")
        loaded = load_dataset("parquet", data_dir=str(tmp_path / "out"), split="train", cache_dir=cache)
        assert loaded.num_rows == rows
        assert type(loaded.features["image"]).__name__ == "Image"
        assert loaded.features["label"].names == ["cat", "dog"]
        seen.append(rows)
        return path

    monkeypatch.setattr(Store, "commit", read_after)
    assert runner.run(job(tiny, source, tmp_path / "out", output__chunk_rows=40)) == 0
    assert seen in ([40, 64], [24, 64])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("empty_struct", pa.array([{}] * 4, pa.struct([])), "column empty_struct of type struct<> cannot be written"),
        ("union", UNION, "column union of type"),
        ("interval", pa.nulls(4, pa.month_day_nano_interval()), "column interval of type"),
        ("completion", pa.array(["x"] * 4), "columns that batchrun adds to the output: completion.*output.prefix"),
        ("status", pa.array(["x"] * 4), "columns that batchrun adds to the output: status"),
        ("text", pa.array(["y"] * 4), "more than one column named text"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tiny: Path, tmp_path: Path, name: str, array: pa.Array, message: str
) -> None:
    texts = pa.array(["w5 w6"] * 4)
    source = torture.write(tmp_path / "in.arrow", pa.Table.from_arrays([texts, array], names=["text", name]))
    with pytest.raises((InputError, ConfigError), match=message):
        runner.run(job(tiny, source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    leaves_out = {"input__columns": ["text"]} if name != "text" else {}
    if leaves_out:
        assert runner.run(job(tiny, source, tmp_path / "out", **leaves_out)) == 0


def test_a_prefix_makes_room_for_a_column_of_our_name(tiny: Path, tmp_path: Path) -> None:
    made = pa.table({"text": ["w5"], "completion": [7], "status": [b"mine"]})
    source = torture.write(tmp_path / "in.parquet", made)
    runner.run(job(tiny, source, tmp_path / "out", output__prefix="llm_"))
    found = carried(tmp_path / "out", ["text", "completion", "status", "llm_completion"])
    assert found.to_pylist()[0]["completion"] == 7
    assert found.to_pylist()[0]["status"] == b"mine"


def test_broken_text_is_one_row_s_error_and_is_carried_as_it_is(tiny: Path, tmp_path: Path) -> None:
    broken = pa.array([b"w5", b"\xff\xfe", b"w6"]).view(pa.string())
    source = torture.write(tmp_path / "in.arrow", pa.table({"text": broken}))
    runner.run(job(tiny, source, tmp_path / "out"))
    part = next((tmp_path / "out").glob("part-*"))
    assert pq.read_table(part)["error_type"].to_pylist() == [None, "invalid_row", None]
    assert pq.read_table(part)["text"].cast(pa.binary()).to_pylist() == [b"w5", b"\xff\xfe", b"w6"]


def test_nanoseconds_render_as_iso_text(tiny: Path, tmp_path: Path) -> None:
    from batchrun.data.templates import Template
    from batchrun.data.values import to_python

    values = to_python(pa.array([1_700_000_000_123_456_000], pa.timestamp("ns")))
    text = Template("prompt.template", "{{ at }}", ["at"]).render({"at": values[0]})
    assert re.fullmatch(r"2023-11-14T22:13:20\.123456", text)
