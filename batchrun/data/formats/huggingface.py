"""Hugging Face data sets: by name or folder through `load_dataset`, streamed or not, and saved to disk."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

from batchrun.config import InputConfig
from batchrun.data.formats import base
from batchrun.data.formats.base import FileInfo, Reader, RowRange, overlaps, pieces
from batchrun.data.formats.parquet import ParquetReader
from batchrun.data.paths import names_of
from batchrun.data.storage import Storage, is_url
from batchrun.errors import InputError

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DIGEST_ROWS = 256
URL_KEYS = {"config": "name", "name": "name", "split": "split", "revision": "revision", "streaming": "streaming"}

Found = list[tuple[str, str]]


def is_saved(path: str) -> bool:
    """Whether a local folder was written by `save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))


def is_dataset_url(path: str) -> bool:
    """`hf://org/name?split=test`, unlike the file address `hf://datasets/org/name/file.parquet`."""
    return path.startswith("hf://") and not path.startswith(("hf://datasets/", "hf://buckets/", "hf://spaces/"))


def open_dataset(config: InputConfig, storage: Storage, offline: bool) -> tuple[Reader, Found]:
    """A reader and the (path, name) of what stands for files: a split, or the files or shards of a streamed one.

    Raises InputError for a data set, configuration or split that is not there.
    """
    if len(config.path) != 1:
        raise InputError(f"input.format=hf takes one data set, and input.path has {len(config.path)}")
    config = _from_url(config) if is_dataset_url(config.path[0]) else config
    path = os.path.expanduser(config.path[0])
    if not is_url(path) and not os.path.isdir(path) and HUB_ID.fullmatch(path) is None:
        raise InputError(f"input.path={path} is neither a folder nor the name of a data set on the hub, as in org/name")
    with _explained(path):
        import datasets

        if offline:
            _go_offline()
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        if is_url(path) or is_saved(path):
            return _saved(path, config, storage)
        return _streamed(path, config, storage) if config.streaming else _loaded(path, config, storage)


def _from_url(config: InputConfig) -> InputConfig:
    url = urlsplit(config.path[0])
    given = dict(parse_qsl(url.query))
    if unknown := given.keys() - URL_KEYS.keys():
        raise InputError(f"input.path={config.path[0]}: {', '.join(unknown)} is not one of {', '.join(URL_KEYS)}")
    named: dict[str, Any] = {URL_KEYS[key]: value for key, value in given.items()}
    if "streaming" in named:
        named["streaming"] = named["streaming"].lower() in ("1", "true")
    return replace(config, path=[f"{url.netloc}{url.path}"], **named)


def _go_offline() -> None:
    """What HF_HUB_OFFLINE=1 does, which both libraries look for on import only."""
    import datasets
    import huggingface_hub

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"input.path={path} cannot be loaded as a data set: {type(error).__name__}: {error}"
        ) from error


def _saved(path: str, config: InputConfig, storage: Storage) -> tuple[Reader, Found]:
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(path, storage_options=storage.options or None)
    if isinstance(loaded, Dataset):
        if config.split not in (None, str(loaded.split)):
            raise InputError(f"input.split={config.split}: {path} holds one data set, of split {loaded.split}")
        name = str(loaded.split or Path(path).name)
        return DatasetReader({name: loaded}), [(name, name)]
    split = _one_split(config.split, list(loaded))
    return DatasetReader({split: loaded[split]}), [(split, split)]


def _loaded(path: str, config: InputConfig, storage: Storage) -> tuple[Reader, Found]:
    from datasets import load_dataset

    loaded = load_dataset(path, config.name, revision=config.revision, split=config.split, **_options(storage))
    split = config.split or _one_split(None, list(loaded))
    return DatasetReader({split: loaded if config.split else loaded[split]}), [(split, split)]


def _streamed(path: str, config: InputConfig, storage: Storage) -> tuple[Reader, Found]:
    """Parquet files are read as such, by row group. All else comes as shards, each read from its beginning."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.packaged_modules.parquet.parquet import Parquet

    builder = load_dataset_builder(path, config.name, revision=config.revision, **_options(storage))
    files = builder.config.data_files or {}
    if isinstance(builder, Parquet) and files:
        split = _one_split(config.split, list(map(str, files)))
        paths = [str(file) for file in files[split]]
        return StreamedParquetReader(storage, builder.info.features), list(zip(paths, names_of(paths), strict=True))
    streams = load_dataset(path, config.name, revision=config.revision, streaming=True, **_options(storage))
    split = _one_split(config.split, list(streams))
    reader = ShardReader(streams[split])
    names = [f"{split}-{shard:05d}-of-{reader.count:05d}" for shard in range(reader.count)]
    return reader, list(zip(names, names, strict=True))


def _options(storage: Storage) -> dict[str, Any]:
    return {"storage_options": storage.options} if storage.options else {}


def _one_split(asked: str | None, there: Sequence[str]) -> str:
    if asked is None and len(there) == 1:
        return there[0]
    if asked is None or asked not in there:
        given = "input.split is not set" if asked is None else f"input.split={asked} is not a split"
        raise InputError(f"{given}; the data set has {', '.join(there)}")
    return asked


def _edges_digest(rows: int, schema: pa.Schema, edges: Sequence[pa.Table]) -> str:
    """SHA-256 of the row count, the schema, and the first and last rows, whatever files they lie in."""
    hashed = hashlib.sha256(f"{rows} {schema.remove_metadata()}".encode())
    for table in edges:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
            for batch in table.combine_chunks().to_batches():
                writer.write_batch(batch)
        hashed.update(sink.getvalue())
    return hashed.hexdigest()


class DatasetReader(Reader):
    """Data sets on local disk, by the name of their split. Rows are looked up by number; nothing is iterated."""

    def __init__(self, splits: dict[str, Any]) -> None:
        self._splits = {name: dataset.with_format("arrow") for name, dataset in splits.items()}

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        dataset = self._splits[path]
        rows, schema = dataset.num_rows, dataset.features.arrow_schema
        edges = [dataset[:DIGEST_ROWS], dataset[max(0, rows - DIGEST_ROWS) :]] if rows else []
        digest = _edges_digest(rows, schema, edges)
        return FileInfo(rows if limit is None else min(rows, limit), schema, dataset.data.nbytes, digest)

    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        dataset = self._splits[path]
        if set(schema.names) < set(dataset.column_names) and schema.names:
            dataset = dataset.select_columns(schema.names)
        for start, stop in ranges:
            for first in range(start, stop, base.BATCH_ROWS):
                for batch in dataset[first : min(stop, first + base.BATCH_ROWS)].to_batches():
                    yield from pieces(first, batch)
                    first += batch.num_rows


class StreamedParquetReader(ParquetReader):
    """The Parquet files of a streamed data set, with the features that its card declares."""

    def __init__(self, storage: Storage, features: Any) -> None:
        super().__init__(storage)
        self._declared: pa.Schema | None = None if features is None else features.arrow_schema

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        info = super().inspect(path, limit)
        if self._declared is not None and self._declared.equals(info.schema.remove_metadata()):
            return info._replace(schema=self._declared)
        return info


class ShardReader(Reader):
    """Shards of a streamed data set. A range is found by counting from the shard's first row, not by a saved state."""

    def __init__(self, stream: Any) -> None:
        self.count: int = stream.num_shards
        self._stream = stream

    def _tables(self, path: str) -> Iterator[pa.Table]:
        number = int(path.rsplit("-", 3)[1])
        shard = self._stream.shard(num_shards=self.count, index=number)
        with _explained(path):
            yield from shard.with_format("arrow").iter(batch_size=base.BATCH_ROWS)

    def inspect(self, path: str, limit: int | None) -> FileInfo:
        rows = size = 0
        schema = None if self._stream.features is None else self._stream.features.arrow_schema
        edges: list[pa.Table] = []
        for table in self._tables(path):
            schema = schema or table.schema
            edges = [*edges[:1], table]
            rows, size = rows + table.num_rows, size + table.nbytes
            if limit is not None and rows >= limit:
                break
        schema = schema if schema is not None else pa.schema([])
        return FileInfo(rows if limit is None else min(rows, limit), schema, size, _edges_digest(rows, schema, edges))

    def batches(self, path: str, ranges: Sequence[RowRange], schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
        first = 0
        for table in self._tables(path):
            if first >= ranges[-1][1]:
                return
            for batch in table.to_batches():
                if overlaps(first, first + batch.num_rows, ranges):
                    yield from pieces(first, batch)
                first += batch.num_rows
