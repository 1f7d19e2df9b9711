from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.data.buffer import ChunkBuffer, Place
from batchrun.data.journal import Journal
from batchrun.data.outputs import RowResult
from batchrun.data.plan import Chunk
from batchrun.errors import BatchrunError

SOURCE = "in.parquet"
CHUNK = Chunk(0, 1, 10, 20)
RESULTS = {
    (10, 0): RowResult("plain", "stop", prompt_tokens=3, cached_tokens=1, completion_tokens=2, total_s=0.1),
    (11, 0): RowResult("half a pair \ud835, a line\nend, a null\x00, 日本", "length"),
    (12, 0): RowResult(None, "error", "error", "engine_error", "it \udc00 broke"),
}


def write(folder: Path, results: dict[Place, RowResult], run: str = "run1", fingerprint: str = "f1") -> Journal:
    journal = Journal(folder, fingerprint, run)
    buffer = ChunkBuffer(CHUNK, SOURCE)
    journal.watch(buffer)
    for (row, _), result in results.items():
        buffer.add(row, result)
    journal.flush()
    return journal


def files(folder: Path) -> list[Path]:
    return sorted((folder / "__batchrun" / "journal").iterdir())


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, RESULTS)
    assert Journal(tmp_path, "f1", "run2").restore(CHUNK, SOURCE) == RESULTS
    assert [path.name for path in files(tmp_path)] == ["part-00000-000001.run1.journal"]


def test_several_runs_add_up_and_each_row_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, {(10, 0): RESULTS[10, 0]})
    journal = Journal(tmp_path, "f1", "run2")
    buffer = ChunkBuffer(CHUNK, SOURCE, journal.restore(CHUNK, SOURCE))
    journal.watch(buffer)
    journal.flush()
    assert len(files(tmp_path)) == 1, "what was restored is not written again"
    for row in (12, 11):
        buffer.add(row, RESULTS[row, 0])
        journal.flush()
    journal.flush()
    assert Journal(tmp_path, "f1", "run3").restore(CHUNK, SOURCE) == RESULTS
    content = files(tmp_path)[1].read_bytes()
    assert content.count(b"half a pair") == 1
    assert b"plain" not in content


@pytest.mark.parametrize(
    ("fingerprint", "chunk", "source"),
    [("f2", CHUNK, SOURCE), ("f1", Chunk(0, 1, 10, 21), SOURCE), ("f1", CHUNK, "other.parquet")],
)
def test_rows_of_another_job_or_of_other_rows_are_not_taken(
    tmp_path: Path, fingerprint: str, chunk: Chunk, source: str
) -> None:
    write(tmp_path, RESULTS)
    assert Journal(tmp_path, fingerprint, "run2").restore(chunk, source) == {}


@given(st.data())
def test_a_file_cut_anywhere_is_good_up_to_there(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, "f1", "run1")
    buffer = ChunkBuffer(CHUNK, SOURCE)
    journal.watch(buffer)
    sizes = []
    for row in range(10, 20):
        buffer.add(row, RowResult(f"text {row}"))
        journal.flush()
        sizes.append(os.path.getsize(files(folder)[0]))
    content = files(folder)[0].read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    tail = data.draw(st.binary(max_size=8))
    files(folder)[0].write_bytes(content[:cut] + tail)
    found = Journal(folder, "f1", "run2").restore(CHUNK, SOURCE)
    # The newline at the end of a block may be lost: its checksum tells that it is whole.
    whole = sum(size - 1 <= cut for size in sizes)
    rows = {row for row, _ in found}
    assert rows <= set(range(10, 10 + whole))
    assert rows >= set(range(10, 10 + max(0, whole - 1)))
    assert all(result == RowResult(f"text {row}") for (row, _), result in found.items())


def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    write(tmp_path, RESULTS)
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b"plain", b"plane"))
    assert Journal(tmp_path, "f1", "run2").restore(CHUNK, SOURCE) == {}


def test_files_go_after_the_commit_those_of_dead_runs_too(tmp_path: Path) -> None:
    write(tmp_path, {(10, 0): RESULTS[10, 0]})
    journal = write(tmp_path, {(11, 0): RESULTS[11, 0]}, run="run2")
    assert len(files(tmp_path)) == 2
    journal.close(CHUNK)
    assert len(files(tmp_path)) == 2, "nothing is deleted before the flush"
    journal.flush()
    assert files(tmp_path) == []
    journal.flush()


def test_left_overs_of_finished_parts_can_be_discarded(tmp_path: Path) -> None:
    write(tmp_path, RESULTS)
    journal = Journal(tmp_path, "f1", "run2")
    assert journal.stems() == ["part-00000-000001"]
    journal.discard(journal.stems())
    assert files(tmp_path) == []


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "f1", "run1")
    buffer = ChunkBuffer(CHUNK, SOURCE)
    journal.watch(buffer)
    buffer.add(10, RESULTS[10, 0])
    (tmp_path / "__batchrun" / "journal").rmdir()
    with pytest.raises(BatchrunError, match="it was removed while the job ran"):
        journal.flush()


def test_nothing_is_written_before_there_are_rows(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert files(tmp_path) == []
