from __future__ import annotations

import pyarrow as pa
import pytest

from batchrun.data.buffer import ChunkBuffer
from batchrun.data.outputs import RowResult
from batchrun.data.plan import Chunk

SOURCE = "in.parquet"
CHUNK = Chunk(0, 1, 10, 13)


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


def test_buffer_restores_input_order() -> None:
    buffer = ChunkBuffer(CHUNK, SOURCE)
    assert not buffer.complete
    buffer.add_batch(12, batch(12))
    for row in (12, 10, 11):
        buffer.add(row, RowResult(f"t{row}"))
    assert not buffer.complete
    buffer.add_batch(10, batch(10, 11))
    assert buffer.complete
    assert [row for each in buffer.batches for row in each.column("id").to_pylist()] == [10, 11, 12]
    assert [result.text for result in buffer.results] == ["t10", "t11", "t12"]


def test_buffer_takes_each_row_once_and_only_its_own() -> None:
    buffer = ChunkBuffer(CHUNK, SOURCE)
    buffer.add(10, RowResult())
    buffer.add_batch(10, batch(10, 11))
    for row in (9, 13):
        with pytest.raises(ValueError, match=f"row {row}, sample 0 is not in"):
            buffer.add(row, RowResult())
    with pytest.raises(ValueError, match="has a result already"):
        buffer.add(10, RowResult())
    with pytest.raises(ValueError, match="are here already"):
        buffer.add_batch(11, batch(11, 12))
    with pytest.raises(ValueError, match="not all in"):
        buffer.add_batch(12, batch(12, 13))
    with pytest.raises(ValueError, match=r"2 rows of .* have no result"):
        _ = buffer.results


def test_samples_come_in_any_order_and_leave_in_theirs() -> None:
    buffer = ChunkBuffer(Chunk(0, 1, 10, 12, samples=2), SOURCE, {(11, 0): RowResult("t11.0")})
    buffer.add_batch(10, batch(10, 11))
    assert buffer.without_result(10, 12) == [(10, 0), (10, 1), (11, 1)]
    for row, sample in ((11, 1), (10, 1), (10, 0)):
        assert not buffer.complete
        buffer.add(row, RowResult(f"t{row}.{sample}", sample=sample))
    assert buffer.complete
    assert [result.text for result in buffer.results] == ["t10.0", "t10.1", "t11.0", "t11.1"]
    assert buffer.arrived(2) == ([10, 10], [buffer.results[1], buffer.results[0]])
    for row, sample in ((10, 2), (12, 0), (9, 1)):
        with pytest.raises(ValueError, match=f"row {row}, sample {sample} is not in"):
            buffer.add(row, RowResult(sample=sample))
    with pytest.raises(ValueError, match=r"sample 1 of .* has a result already"):
        buffer.add(10, RowResult(sample=1))


def test_buffer_of_no_rows_is_complete_at_once() -> None:
    buffer = ChunkBuffer(Chunk(0, 0, 0, 0), SOURCE)
    assert buffer.complete
    assert buffer.batches == []
    assert list(buffer.results) == []
