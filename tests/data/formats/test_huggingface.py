from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of, write_lines


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf-cache"))


def parquet_set(folder: Path, files: int = 3, rows: int = 10) -> Path:
    (folder / "data").mkdir(parents=True)
    for i in range(files):
        table = pa.table({"id": range(i * rows, (i + 1) * rows), "text": [f"t{j}" for j in range(rows)]})
        pq.write_table(table, folder / "data" / f"train-{i:05d}-of-{files:05d}.parquet", row_group_size=4)
    pq.write_table(pa.table({"id": [99], "text": ["last"]}), folder / "data" / "test-00000-of-00001.parquet")
    return folder


def jsonl_set(folder: Path) -> Path:
    for i in range(2):
        write_lines(folder / f"train-{i}.jsonl", [{"id": i * 1500 + j, "text": "x"} for j in range(1500)])
    return folder


def test_a_split_by_name_and_by_address(tmp_path: Path) -> None:
    folder = parquet_set(tmp_path / "reviews")
    source = opened(folder, format="hf", split="train")
    assert [(file.name, file.rows) for file in source.files] == [("train", 30)]
    assert [row["id"] for row in rows_of(source, [(3, 5), (28, 30)])] == [3, 4, 28, 29]
    assert [row["id"] for row in rows_of(opened(folder, format="hf", split="test"))] == [99]
    assert opened(folder, format="hf", split="train[:5]").files[0].rows == 5


def test_a_split_must_be_chosen_when_there_are_several(tmp_path: Path) -> None:
    folder = parquet_set(tmp_path / "reviews")
    for streaming in (False, True):
        with pytest.raises(InputError, match=r"input\.split is not set; the data set has train, test"):
            opened(folder, format="hf", streaming=streaming)
        with pytest.raises(InputError, match="nope"):
            opened(folder, format="hf", split="nope", streaming=streaming)


def test_streamed_parquet_is_read_by_file_and_row_group(tmp_path: Path) -> None:
    source = opened(parquet_set(tmp_path / "reviews"), format="hf", split="train", streaming=True)
    assert [file.name for file in source.files] == [f"train-{i:05d}-of-00003.parquet" for i in range(3)]
    assert [file.rows for file in source.files] == [10, 10, 10]
    assert [row["id"] for row in rows_of(source)] == list(range(30))
    [(first, batch)] = source.read(source.files[2], [(6, 7)])
    assert (first, batch.column("id").to_pylist()) == (6, [26])


def test_streamed_shards_come_back_the_same_from_any_row(tmp_path: Path) -> None:
    folder = jsonl_set(tmp_path / "rows")
    source = opened(folder, format="hf", streaming=True)
    assert [file.name for file in source.files] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert [file.rows for file in source.files] == [1500, 1500]
    assert [row["id"] for row in rows_of(source)] == list(range(3000))
    for start, stop in [(0, 1), (1023, 1026), (1499, 1500)]:
        for _ in range(2):
            found = [i for _, batch in source.read(source.files[1], [(start, stop)]) for i in batch["id"].to_pylist()]
            assert found == list(range(1500 + start, 1500 + stop))
    again = opened(folder, format="hf", streaming=True)
    assert [file.digest for file in again.files] == [file.digest for file in source.files]
    assert opened(folder, format="hf", streaming=True, limit=1600).files[1].rows == 100


def test_saved_to_disk_with_features(tmp_path: Path) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"]), "id": datasets.Value("int64")}
    )
    schema = features.arrow_schema
    images = pa.array([{"bytes": b"abc", "path": None}] * 2000, schema.field("image").type)
    table = pa.Table.from_arrays([images, pa.array([0, 1] * 1000), pa.array(range(2000))], schema=schema)
    saved = datasets.Dataset(table)
    saved.save_to_disk(tmp_path / "saved")
    source = opened(tmp_path / "saved")
    assert source.files[0].rows == 2000
    assert json.loads(source.schema.metadata[b"huggingface"])["info"]["features"]["image"]["_type"] == "Image"
    found = rows_of(source, [(1999, 2000)])
    assert found == [{"image": {"bytes": b"abc", "path": None}, "label": 1, "id": 1999, "number": 1999}]
    assert rows_of(opened(tmp_path / "saved", columns=["id"]), [(5, 6)]) == [{"id": 5, "number": 5}]

    datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}).save_to_disk(tmp_path / "both")
    assert opened(tmp_path / "both", split="test").files[0].rows == 3
    with pytest.raises(InputError, match="the data set has train, test"):
        opened(tmp_path / "both")


def test_another_content_is_another_digest(tmp_path: Path) -> None:
    digests = []
    for name, last in (("one", "x"), ("two", "x"), ("three", "y")):
        datasets.Dataset.from_dict({"text": ["a"] * 1000 + [last]}).save_to_disk(tmp_path / name)
        digests.append(opened(tmp_path / name).files[0].digest)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./mistyped", "neither a folder nor the name of a data set"),
        ("org/there_is_no_such_set", "cannot be loaded as a data set"),
        ("hf://org/name?splitt=test", "splitt is not one of"),
    ],
)
def test_what_is_not_there_is_named_at_once(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(path, format="hf")


def test_an_address_with_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parquet_set(tmp_path / "reviews")
    asked: dict[str, Any] = {}
    load = datasets.load_dataset

    def hub(path: str, name: str | None, **options: Any) -> Any:
        asked.update(options, path=path, name=name)
        return load(str(folder), split=options["split"])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = opened("hf://org/reviews?split=test&config=plain&revision=v1")
    assert (asked["path"], asked["name"], asked["split"], asked["revision"]) == ("org/reviews", "plain", "test", "v1")
    assert rows_of(source) == [{"id": 99, "text": "last", "number": 0}]
