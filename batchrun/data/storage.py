"""Where input files lie: local paths and fsspec URLs (s3://, gs://, https://, memory://, hf://datasets/...)."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

import pyarrow as pa

from batchrun.errors import InputError

URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
DIGEST_BYTES = 64 << 10
STREAM_BYTES = 1 << 20
# What a remote file fetches in one request when it is read from front to back.
REMOTE_BLOCK_BYTES = 4 << 20


def is_url(path: str) -> bool:
    """Whether a path names a place for fsspec; `file://` is a local one."""
    return URL.match(path) is not None and not path.startswith("file://")


def base_name(path: str) -> str:
    """The path without the query of a web address, whose tokens are neither part of a name nor of an ending."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


class Storage:
    """Opens files wherever they are. `options` go to fsspec's file system, as its `storage_options`."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def filesystem(self, url: str) -> tuple[Any, str]:
        """The fsspec file system of a URL and the path on it. Raises InputError for one that is not installed."""
        import fsspec

        try:
            return fsspec.core.url_to_fs(url, **self.options)
        except ImportError as error:
            scheme = urlsplit(url).scheme
            package = {"s3": "pip install 'batchrun[s3]'", "gs": "pip install gcsfs"}.get(scheme, str(error))
            raise InputError(f"input.path={url}: {scheme}:// is not installed here: {package}") from error
        except (ValueError, TypeError) as error:
            raise InputError(f"input.path={url}: {error}: check the address and input.storage_options") from error

    def open(self, path: str, *, random: bool = False) -> IO[bytes]:
        """The file's bytes, for reading from front to back or, with `random`, at places far apart."""
        if not is_url(path):
            return open(path, "rb", buffering=0)
        filesystem, key = self.filesystem(path)
        options = {"cache_type": "none"} if random else {"cache_type": "readahead", "block_size": REMOTE_BLOCK_BYTES}
        opened: IO[bytes] = filesystem.open(key, "rb", **options)
        return opened

    @contextmanager
    def open_text(self, path: str, digest: Any = None) -> Iterator[io.BufferedReader]:
        """The bytes of a text file, decompressed by its ending; `digest` is updated with what the file holds."""
        compression = COMPRESSIONS.get(os.path.splitext(base_name(path))[1])
        with self.open(path) as file:
            raw: Any = file if digest is None else _Hashed(file, digest)
            if compression is not None:
                raw = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
            with io.BufferedReader(raw, STREAM_BYTES) as stream:
                yield stream

    def digest(self, path: str) -> tuple[int, str]:
        """Size in bytes, and SHA-256 of the size and the first and last 64 KiB."""
        with self.open(path, random=True) as file:
            size = file.seek(0, os.SEEK_END)
            hashed = hashlib.sha256(size.to_bytes(8, "little"))
            for offset in (0, max(0, size - DIGEST_BYTES)):
                file.seek(offset)
                hashed.update(file.read(DIGEST_BYTES))
        return size, hashed.hexdigest()


class _Hashed(io.RawIOBase):
    """A file that hashes and counts what is read from it, once, from front to back."""

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file = file
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        return len(data)


@contextmanager
def reading(path: str, doing: str) -> Iterator[None]:
    """Turn whatever reading a file raises into an InputError: clients of remote stores share no base of errors."""
    try:
        yield
    except InputError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot {doing}: {error or type(error).__name__}") from error
    except Exception as error:
        if not is_url(path):
            raise
        raise InputError(f"{path}: cannot {doing}: {type(error).__name__}: {error}") from error
