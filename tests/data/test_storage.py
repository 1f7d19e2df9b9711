"""Input from remote stores: fsspec's own in memory, an HTTP server, and a server that speaks the S3 protocol."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.data.storage import Storage, is_url
from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of, write_lines
from tests.data.formats.test_requests import request


def write_all(folder: Path) -> dict[str, bytes]:
    """One file of each format with ids 0 to 2999, as bytes by name."""
    table = pa.table({"id": range(3000), "text": [f"text {i}" for i in range(3000)]})
    lines = [{"id": i, "text": f"text {i}"} for i in range(3000)]
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "p.parquet", row_group_size=500)
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    write_lines(folder / "j.jsonl", lines)
    write_lines(folder / "z.jsonl.gz", lines)
    write_lines(folder / "c.csv", ["id,text", *(f"{i},text {i}" for i in range(3000))])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check(url: str, **settings: Any) -> None:
    """All rows, and rows from the middle, come as they are."""
    source = opened(url, **settings)
    assert [row["id"] for row in rows_of(source)] == list(range(3000))
    assert [row["text"] for row in rows_of(source, [(10, 11), (2500, 2502)])] == ["text 10", "text 2500", "text 2501"]
    [file] = source.files
    assert file.path == url
    assert file.name == url.rpartition("/")[2].partition("?")[0]
    assert len(file.digest) == 64


NAMES = ["p.parquet", "a.arrow", "j.jsonl", "z.jsonl.gz", "c.csv"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    for name, content in write_all(tmp_path / "made").items():
        filesystem.pipe(f"/bucket/in/{name}", content)
    yield filesystem
    filesystem.store.clear()


@pytest.mark.parametrize("name", NAMES)
def test_every_format_in_memory(memory: Any, name: str) -> None:
    check(f"memory:///bucket/in/{name}")


def test_remote_folders_and_patterns_follow_the_local_rules(memory: Any) -> None:
    one = io.BytesIO()
    pq.write_table(pa.table({"id": [1]}), one)
    for name in ("k=1/a", "k=1/_hidden", "_state/b", "k=2/deep/c", ".git/d"):
        memory.pipe(f"/tree/{name}.parquet", one.getvalue())
    memory.pipe("/tree/k=1/README.md", b"text")
    for url in ("memory:///tree", "memory:///tree/**/*.parquet", "memory:///tree/k=*", "memory:///tree/k={1,2}"):
        found = [file.name for file in opened(url).files]
        assert found == ["k=1/a.parquet", "k=2/deep/c.parquet"], url
    assert [file.name for file in opened("memory:///tree/k=1/*.parquet").files] == ["a.parquet"]
    with pytest.raises(InputError, match=r"memory:///tree/k=3 finds no file there"):
        opened("memory:///tree/k={1,3}")
    with pytest.raises(InputError, match=r"memory:///nothing finds no file there"):
        opened("memory:///nothing")
    with pytest.raises(InputError, match=r"memory:///tree/k=1 is a folder without any"):
        opened("memory:///tree/k=1", format="csv")


def test_local_and_remote_files_together(memory: Any, tmp_path: Path) -> None:
    source = opened(["memory:///bucket/in/j.jsonl", str(tmp_path / "made" / "j.jsonl")])
    assert sum(file.rows for file in source.files) == 6000
    assert len({file.name for file in source.files}) == 2


def test_filters_and_requests_from_memory(memory: Any, tmp_path: Path) -> None:
    found = rows_of(opened("memory:///bucket/in/p.parquet", filter="id >= 1500 and id < 1503"))
    assert [row["id"] for row in found] == [1500, 1501, 1502]
    memory.pipe("/bucket/r.jsonl", write_lines(tmp_path / "r.jsonl", [request("x"), request("y")]).read_bytes())
    assert [row["custom_id"] for row in rows_of(opened("memory:///bucket/r.jsonl", format="openai"))] == ["x", "y"]


class Ranges(SimpleHTTPRequestHandler):
    """Files with byte ranges, which the library's handler does not offer."""

    def do_GET(self) -> None:
        content = (Path(self.directory) / self.path.partition("?")[0].lstrip("/")).read_bytes()
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        start, stop = int(first or 0), min(int(last or len(content)), len(content) - 1) + 1
        part = content[start:stop] if asked else content
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        path = Path(self.directory) / self.path.partition("?")[0].lstrip("/")
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    write_all(tmp_path / "made")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path / "made")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", NAMES)
def test_every_format_over_http(web: str, name: str) -> None:
    check(f"{web}/{name}")


def test_a_query_is_neither_ending_nor_name(web: str) -> None:
    check(f"{web}/j.jsonl?token=secret.parquet")


def test_a_web_address_that_is_not_there(web: str) -> None:
    with pytest.raises(InputError, match=r"nope\.jsonl"):
        opened(f"{web}/nope.jsonl")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server with every format in bucket `rows`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.mkdir("rows")
    for name, content in write_all(tmp_path_factory.mktemp("s3") / "made").items():
        filesystem.pipe(f"rows/in/{name}", content)
    yield options
    server.stop()


@pytest.mark.parametrize("name", NAMES)
def test_every_format_on_s3(s3: dict[str, Any], name: str) -> None:
    check(f"s3://rows/in/{name}", storage_options=s3)


def test_patterns_and_filters_on_s3(s3: dict[str, Any]) -> None:
    source = opened("s3://rows/*/*.parquet", storage_options=s3, filter="id >= 2999")
    assert [(file.name, file.rows) for file in source.files] == [("p.parquet", 1)]
    assert [file.name for file in opened("s3://rows/in", storage_options=s3, format="csv").files] == ["c.csv"]


def test_what_s3_refuses_is_an_input_error(s3: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"s3://rows/none\.parquet finds no file"):
        opened("s3://rows/none.parquet", storage_options=s3)
    with pytest.raises(InputError, match=r"s3://nobucket/x\.parquet"):
        opened("s3://nobucket/x.parquet", storage_options=s3)
    closed = {**s3, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(InputError, match=r"s3://rows/in/p\.parquet: cannot list the files there"):
        opened("s3://rows/in/p.parquet", storage_options=closed)


def test_a_scheme_that_is_not_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"nosuch://x/y\.parquet"):
        opened("nosuch://x/y.parquet")

    def absent(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(InputError, match=r"pip install 'batchrun\[s3\]'"):
        opened("s3://bucket/x.parquet")


def test_file_addresses_are_local(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1}])
    assert not is_url(f"file://{path}")
    assert opened(f"file://{path}").files == opened(path).files


def test_the_digest_sees_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 200_000)
    size, before = Storage().digest(str(path))
    assert size == 200_000
    for offset in (0, 199_999):
        content = bytearray(b"x" * 200_000)
        content[offset] = 0
        path.write_bytes(bytes(content))
        assert Storage().digest(str(path))[1] != before
