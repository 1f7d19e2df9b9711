from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchrun.config import OutputConfig
from batchrun.data.ledger import Ledger
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import Plan
from batchrun.data.sources import InputFile
from batchrun.data.store import Store
from batchrun.errors import BatchrunError, FingerprintMismatch

SCHEMA = pa.schema([("id", pa.int64())])


class Folder:
    """An output of three files of 7, 0 and 4 rows in chunks of 2: seven chunks."""

    def __init__(self, path: Path, fingerprint: str = "f1") -> None:
        files = [InputFile(i, f"/in/{i}", f"{i}.parquet", 1, rows, "") for i, rows in enumerate((7, 0, 4))]
        self.plan = Plan(files, 2)
        self.store = Store(path, fingerprint)
        self.schema = OutputSchema(OutputConfig(), SCHEMA, fingerprint)

    def commit(self, *numbers: int) -> None:
        for number in numbers:
            chunk = self.plan.chunk(number)
            rows = pa.table({"id": pa.array(range(chunk.start, chunk.stop), pa.int64())})
            name = self.plan.files[chunk.file].name
            self.store.commit(chunk, self.schema.table(rows, chunk, name, [RowResult("x")] * chunk.rows))

    def ledger(self, *own: int) -> Ledger:
        numbers = np.array(own, dtype=np.int64) if own else self.plan.share(0, 1)
        return Ledger(self.store, self.plan, numbers)

    def part(self, number: int) -> Path:
        return self.store.folder / self.plan.chunk(number).part


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def broken(ledger: Ledger) -> list[int]:
    with ledger.checking():
        found = ledger.broken()
    assert found is not None
    return found.tolist()


def test_missing_and_present_are_those_of_the_share(folder: Folder) -> None:
    folder.commit(0, 3, 4, 6)
    (folder.store.folder / "part-00000-000009.parquet").touch()
    (folder.store.folder / "part-notes.txt").touch()
    ledger = folder.ledger()
    assert ledger.present.tolist() == [0, 3, 4, 6]
    assert ledger.missing.tolist() == [1, 2, 5]
    share = folder.ledger(1, 3, 5)
    assert (share.present.tolist(), share.missing.tolist()) == ([3], [1, 5])
    assert share.owns(folder.plan.chunk(3).part)
    assert not share.owns(folder.plan.chunk(4).part)
    assert not share.owns("part-00009-000000.parquet")


def test_broken_parts_are_found_and_only_those(folder: Folder) -> None:
    folder.commit(*range(7))
    folder.part(2).write_bytes(b"PAR1")
    folder.part(5).write_bytes(folder.part(6).read_bytes())
    assert broken(folder.ledger()) == [2, 5]
    assert broken(folder.ledger(0, 2, 4)) == [2]


def test_a_part_of_another_job_is_raised_where_the_result_is_asked_for(folder: Folder, tmp_path: Path) -> None:
    folder.commit(0)
    other = Folder(tmp_path, "f2").ledger()
    with other.checking(), pytest.raises(FingerprintMismatch):
        other.broken()


def test_a_check_that_takes_long_is_not_waited_for(folder: Folder) -> None:
    import threading

    folder.commit(0, 1)
    ledger, go_on = folder.ledger(), threading.Event()
    with ledger.checking(look=lambda chunk: go_on.wait() and chunk.index == 1):
        assert ledger.broken(timeout=0.01) is None
        go_on.set()
        late = ledger.broken()
    assert late is not None
    assert late.tolist() == [1]


def test_complete_means_every_part_as_it_was_seen(folder: Folder) -> None:
    folder.commit(0, 1, 2, 3, 4)
    ledger = folder.ledger()
    assert broken(ledger) == []
    for number in (5, 6):
        folder.commit(number)
        ledger.note(folder.plan.chunk(number))
    ledger.check_complete(ledger.own)
    os.utime(folder.part(1))
    ledger.check_complete(ledger.own)
    folder.part(1).write_bytes(b"x")
    with pytest.raises(BatchrunError, match=r"1 parts of .*part-00000-000001\.parquet"):
        ledger.check_complete(ledger.own)
    folder.part(6).unlink()
    with pytest.raises(BatchrunError, match="2 parts of"):
        ledger.check_complete(ledger.own)


def test_a_million_chunks_are_numbers(tmp_path: Path) -> None:
    files = [InputFile(i, f"/in/{i}", f"{i}.parquet", 1, 10_000_000, "") for i in range(10)]
    plan = Plan(files, 100)
    ledger = Ledger(Store(tmp_path, "f1"), plan, plan.share(0, 1))
    assert len(ledger.missing) == plan.num_chunks == 1_000_000
    assert plan.results_of(ledger.missing) == 100_000_000
    assert plan.chunk(999_999).part == "part-00009-099999.parquet"
    assert plan.number("part-00009-099999.parquet") == 999_999
