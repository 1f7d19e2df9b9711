from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchrun.config import OutputConfig
from batchrun.data import merge as merge_module
from batchrun.data.manifest import build_manifest, write_manifest
from batchrun.data.merge import Merged, merge_parts
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import Plan
from batchrun.data.sources import InputFile
from batchrun.data.store import Store
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch

FEATURES = {
    "id": {"dtype": "int64", "_type": "Value"},
    "when": {"dtype": "timestamp[ns, tz=Europe/Paris]", "_type": "Value"},
    "tags": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
}
SCHEMA = pa.schema(
    [("id", pa.int64()), ("when", pa.timestamp("ns", "Europe/Paris")), ("tags", pa.list_(pa.string()))],
    {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode(), b"mine": b"kept"},
)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished job of 25 rows in 3 files and 8 parts."""
    folder = tmp_path / "out"
    files = [InputFile(i, "", f"{i}.parquet", 1, rows, "") for i, rows in enumerate((12, 0, 13))]
    manifest = build_manifest({"output.chunk_rows": 4}, files)
    write_manifest(folder, manifest)
    store = Store(folder, manifest["fingerprint"])
    schema = OutputSchema(OutputConfig(), SCHEMA, manifest["fingerprint"])
    for chunk in Plan(files, 4).chunks():
        ids = [chunk.file * 100 + i for i in range(chunk.start, chunk.stop)]
        table = pa.table({"id": ids, "when": ids, "tags": [["é", None]] * len(ids)}, SCHEMA)
        results = [RowResult(f"text of {i}" * 20, "stop") for i in ids]
        store.commit(chunk, schema.table(table, chunk, files[chunk.file].name, results))
    return folder


def test_rows_schema_and_metadata_are_kept_in_order(output: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in output.rglob("*.parquet")}
    assert merge_parts(output, tmp_path / "merged", 512, "zstd") == Merged(8, 1, 0)
    parts = sorted(output.glob("*.parquet"))
    expected = pa.concat_tables([pq.read_table(part) for part in parts])
    merged = pq.read_table(tmp_path / "merged" / "part-00000.parquet", page_checksum_verification=True)
    assert merged.equals(expected)
    assert merged["source_row"].to_pylist() == [*range(12), *range(13)]
    metadata = merged.schema.metadata
    assert metadata[b"mine"] == b"kept"
    assert b"completion" in metadata[b"huggingface"]
    assert metadata[b"batchrun.fingerprint"] == pq.read_schema(parts[0]).metadata[b"batchrun.fingerprint"]
    assert b"batchrun.chunk" not in metadata
    assert pq.read_metadata(tmp_path / "merged" / "part-00000.parquet").num_row_groups == 1
    assert {path: path.read_bytes() for path in output.rglob("*.parquet")} == before


def test_files_are_filled_up_to_their_size(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in sorted(output.glob("*.parquet"))]
    monkeypatch.setattr(merge_module, "MIB", sum(sizes[:3]))
    parts, files, _ = merge_parts(output, tmp_path / "deep" / "merged", 1, "none")
    assert parts == 8
    assert files == 3
    merged = ds.dataset(tmp_path / "deep" / "merged").to_table()
    assert merged["id"].to_pylist() == ds.dataset(output).to_table()["id"].to_pylist()
    assert sorted(os.listdir(tmp_path / "deep")) == ["merged"]


def test_row_groups_are_bounded(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "GROUP_ROWS", 9)
    merge_parts(output, tmp_path / "merged", 512, "zstd")
    metadata = pq.read_metadata(tmp_path / "merged" / "part-00000.parquet")
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups == [8, 8, 9]


def test_an_unfinished_job_is_refused(output: Path, tmp_path: Path) -> None:
    (output / "part-00002-000001.parquet").unlink()
    with pytest.raises(ConfigError, match=r"1 of 8 parts are not there yet \(part-00002-000001\.parquet\)"):
        merge_parts(output, tmp_path / "merged", 512, "zstd")
    with pytest.raises(ConfigError, match="no manifest"):
        merge_parts(tmp_path, tmp_path / "merged", 512, "zstd")
    assert not (tmp_path / "merged").exists()


def test_what_is_no_part_of_the_job_is_not_merged(output: Path, tmp_path: Path) -> None:
    part = output / "part-00002-000001.parquet"
    whole = part.read_bytes()
    pq.write_table(pa.table({"id": [1]}), part)
    with pytest.raises(FingerprintMismatch, match=r"part-00002-000001\.parquet was made with other settings"):
        merge_parts(output, tmp_path / "merged", 512, "zstd")
    part.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"part-00002-000001\.parquet is broken: .*run the job again"):
        merge_parts(output, tmp_path / "merged", 512, "zstd")
    assert not (tmp_path / "merged").exists()


def test_a_target_in_the_way_is_refused(output: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    for target in (tmp_path / "merged", output / "merged", output):
        with pytest.raises(ConfigError, match=r"output\.merge_path"):
            merge_parts(output, target, 512, "zstd")


@pytest.mark.parametrize("point", ["merge_file", "merge_before_rename"])
def test_a_merge_that_is_cut_short_leaves_nothing_that_looks_done(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def stop(name: str) -> Any:
        if name == point:
            raise BatchrunError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "fault", stop)
        patch.setattr(merge_module.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(BatchrunError, match="killed"):
            merge_parts(output, tmp_path / "merged", 512, "zstd")
    assert not (tmp_path / "merged").exists()
    assert len(list(tmp_path.glob(".merged.*"))) == 1
    merge_parts(output, tmp_path / "merged", 512, "zstd")
    assert sorted(os.listdir(tmp_path)) == ["merged", "out"]
