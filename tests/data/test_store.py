from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.config.output import COMPRESSION, OutputConfig
from batchrun.data import store as store_module
from batchrun.data.outputs import OutputSchema, RowResult
from batchrun.data.plan import Chunk
from batchrun.data.store import Store
from batchrun.errors import BatchrunError, FingerprintMismatch

SOURCE = "in.parquet"
CHUNK = Chunk(0, 1, 10, 13)
SCHEMA = pa.schema([("id", pa.int64())])


def part(chunk: Chunk = CHUNK, fingerprint: str = "f1", text: str = "yes") -> pa.Table:
    output = OutputSchema(OutputConfig(), SCHEMA, fingerprint)
    rows = pa.table({"id": pa.array(range(chunk.start, chunk.stop), pa.int64())})
    return output.table(rows, chunk, SOURCE, [RowResult(text, "stop")] * chunk.rows)


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "__batchrun")


@pytest.mark.parametrize("compression", COMPRESSION)
def test_commit_makes_the_chunk_finished(tmp_path: Path, compression: str) -> None:
    store = Store(tmp_path / "deep/out", "f1", compression)
    assert not store.finished(CHUNK, SOURCE)
    path = store.commit(CHUNK, part())
    assert path == tmp_path / "deep/out/part-00000-000001.parquet"
    assert store.finished(CHUNK, SOURCE)
    assert files(store.folder) == [CHUNK.part]
    assert pq.read_table(path, page_checksum_verification=True).equals(part())
    found = pq.read_metadata(path).row_group(0).column(0).compression
    assert found == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


def test_commit_again_replaces_by_equal_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path, "f1")
    first = store.commit(CHUNK, part()).read_bytes()
    assert store.commit(CHUNK, part()).read_bytes() == first


def test_chunk_without_rows(tmp_path: Path) -> None:
    store, empty = Store(tmp_path, "f1"), Chunk(0, 0, 0, 0)
    path = store.commit(empty, part(empty))
    assert store.finished(empty, SOURCE)
    assert pq.read_schema(path).names == part().schema.names


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_broken_part_is_reported_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    store = Store(tmp_path, "f1")
    path = store.commit(CHUNK, part())
    path.write_bytes({"cut": path.read_bytes()[:-30], "empty": b"", "garbage": b"x" * 500}[damage])
    with caplog.at_level(logging.WARNING):
        assert not store.finished(CHUNK, SOURCE)
    assert f"{path} is broken" in caplog.text
    store.commit(CHUNK, part())
    assert store.finished(CHUNK, SOURCE)


def test_part_of_other_rows_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path, "f1")
    path = store.commit(CHUNK, part())
    others = [(Chunk(0, 1, 10, 14), SOURCE), (Chunk(0, 1, 11, 14), SOURCE), (CHUNK, "other.parquet")]
    for chunk, source in others:
        caplog.clear()
        assert not store.finished(chunk, source)
        assert f"{path} does not hold" in caplog.text


def test_part_that_lacks_rows_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path, "f1")
    pq.write_table(part().slice(1), tmp_path / CHUNK.part)
    assert not store.finished(CHUNK, SOURCE)


def test_flipped_bit_is_seen_by_readers_that_check(tmp_path: Path) -> None:
    path = Store(tmp_path, "f1", "none").commit(CHUNK, part(text="needle"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"needle", b"noodle", 1))
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_file_is_synced_before_the_rename_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, "f1")
    events: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    )
    replace = os.replace

    def rename(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "replace", rename)
    store.commit(CHUNK, part())
    assert events == ["file", "rename", "folder"]


def test_part_of_another_job_or_of_none_is_refused_and_kept(tmp_path: Path) -> None:
    path = Store(tmp_path, "f1").commit(CHUNK, part())
    before = path.read_bytes()
    with pytest.raises(FingerprintMismatch, match=r"part-00000-000001\.parquet.*another output\.path"):
        Store(tmp_path, "f2").finished(CHUNK, SOURCE)
    assert path.read_bytes() == before
    pq.write_table(pa.table({"mine": [1, 2, 3]}), path)
    with pytest.raises(FingerprintMismatch, match="not by batchrun"):
        Store(tmp_path, "f1").finished(CHUNK, SOURCE)


@pytest.mark.parametrize(
    ("point", "in_place"),
    [("before_write", False), ("after_write", False), ("after_verify", False), ("after_rename", True)],
)
def test_kill_at_each_point_of_a_commit(tmp_path: Path, point: str, in_place: bool) -> None:
    code = (
        "import sys\nfrom tests.data.test_store import CHUNK, part\nfrom batchrun.data.store import Store\n"
        "Store(sys.argv[1], 'f1').commit(CHUNK, part())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, cwd=root, env={**os.environ, "BATCHRUN_FAULT": point}, check=False)
    assert killed.returncode == -signal.SIGKILL
    visible = [name for name in files(tmp_path) if not name.startswith(".")]
    assert visible == ([CHUNK.part] if in_place else [])
    store = Store(tmp_path, "f1")
    assert [entry.name for entry in store.entries()] == visible
    assert files(tmp_path) == visible, "temporary files of the killed process are gone"
    assert store.finished(CHUNK, SOURCE) == in_place
    store.commit(CHUNK, part())
    assert files(tmp_path) == [CHUNK.part]
    assert pq.read_table(tmp_path / CHUNK.part).column("id").to_pylist() == [10, 11, 12]


def test_only_stale_temporary_files_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = [f".{CHUNK.part}.{host}-{dead.pid}-a.tmp", f".{CHUNK.part}.{host}-{os.getpid()}-b.tmp"]
    kept = [f".{CHUNK.part}.{host}-{os.getppid()}-c.tmp", f".{CHUNK.part}.other-host-1-d.tmp", ".mine.tmp"]
    old = f".{CHUNK.part}.other-host-1-e.tmp"
    for name in (*gone, *kept, old):
        (tmp_path / name).touch()
    yesterday = time.time() - 25 * 3600
    os.utime(tmp_path / old, (yesterday, yesterday))
    assert list(Store(tmp_path, "f1").entries()) == []
    assert files(tmp_path) == sorted(kept)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(table: pa.Table, path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise error

    store = Store(tmp_path, "f1")
    monkeypatch.setattr(store_module, "_write", fail)
    with pytest.raises(type(error)):
        store.commit(CHUNK, part())
    assert files(tmp_path) == []


def test_part_that_reads_back_differently_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, "f1")
    for wrong in (part(Chunk(0, 1, 10, 12)), part(fingerprint="f2"), part().drop_columns(["id"])):
        monkeypatch.setattr(store_module, "_write", lambda table, path, *_, wrong=wrong: pq.write_table(wrong, path))
        with pytest.raises(BatchrunError, match="reads back differently"):
            store.commit(CHUNK, part())
        assert files(tmp_path) == []


def test_full_disk_names_path_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(tmp_path, "f1")
    monkeypatch.setattr(store_module, "_write", fail)
    with pytest.raises(BatchrunError, match=r"part-00000-000001\.parquet.*No space left.*free some space.*are kept"):
        store.commit(CHUNK, part())


def test_output_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BatchrunError, match=r"cannot write .*out.*a file is in the way"):
        Store(tmp_path / "out", "f1")


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(0, 0, 0, 50)
    table = part(chunk, text="x" * 100)
    monkeypatch.setattr(store_module, "GROUP_BYTES", table.nbytes // 5)
    metadata = pq.read_metadata(Store(tmp_path / "bytes", "f1").commit(chunk, table))
    assert 5 <= metadata.num_row_groups <= 6
    monkeypatch.setattr(store_module, "GROUP_ROWS", 7)
    metadata = pq.read_metadata(Store(tmp_path / "rows", "f1").commit(chunk, table))
    assert metadata.row_group(0).num_rows == 7
    assert metadata.num_rows == 50


def test_data_layer_stays_clear_of_torch_and_the_engine() -> None:
    code = (
        "import sys\nimport batchrun.data.prompts, batchrun.data.store\n"
        "print([name for name in ('torch', 'batchrun.engine', 'batchrun.runner') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
