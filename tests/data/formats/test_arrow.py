from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from batchrun.data.formats import base
from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of


def write(path: Path, sizes: list[int], stream: bool = False, compression: str | None = None) -> Path:
    schema = pa.schema([("id", pa.int64()), ("kind", pa.dictionary(pa.int8(), pa.string()))], {"made": "here"})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    first = 0
    with new(str(path), schema, options=options) as writer:
        for size in sizes:
            ids = pa.array(range(first, first + size), pa.int64())
            kinds = pa.DictionaryArray.from_arrays(pa.array([0] * size, pa.int8()), ["kind"])
            writer.write_batch(pa.RecordBatch.from_arrays([ids, kinds], schema=schema))
            first += size
    return path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_ranges_over_batches_of_any_size(tmp_path: Path, stream: bool, compression: str | None) -> None:
    path = write(tmp_path / "a.arrow", [5, 0, 2000, 1, 70], stream, compression)
    source = opened(path)
    assert source.files[0].rows == 2076
    assert source.schema.metadata == {b"made": b"here"}
    found = rows_of(source, [(0, 1), (4, 6), (1500, 1501), (2004, 2007), (2070, 2076)])
    assert [row["id"] for row in found] == [0, 4, 5, 1500, 2004, 2005, 2006, *range(2070, 2076)]
    assert {row["kind"] for row in found} == {"kind"}
    assert [row["id"] for row in rows_of(source)] == list(range(2076))


@pytest.mark.parametrize("stream", [False, True])
def test_projection_and_no_columns(tmp_path: Path, stream: bool) -> None:
    source = opened(write(tmp_path / "a.feather", [10, 10], stream), columns=["id"])
    assert rows_of(source, [(9, 11)]) == [{"id": 9, "number": 9}, {"id": 10, "number": 10}]
    batches = [(first, batch.num_rows) for first, batch in source.read(source.files[0], [(3, 15)], [])]
    assert sum(rows for _, rows in batches) == 12


def test_large_batches_are_cut(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "a.arrow", [5000]))
    sizes = [batch.num_rows for _, batch in source.read(source.files[0], [(0, 5000)])]
    assert max(sizes) <= base.BATCH_ROWS
    assert sum(sizes) == 5000


def test_limit_and_empty(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "a.arrow", [5, 5]), limit=7)
    assert [row["id"] for row in rows_of(source)] == list(range(7))
    assert opened(write(tmp_path / "b.arrow", [])).files[0].rows == 0


@pytest.mark.parametrize("content", [b"", b"no arrow at all", b"ARROW1\x00\x00"])
def test_foreign_and_truncated_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.arrow: cannot read the file"):
        opened(path)
