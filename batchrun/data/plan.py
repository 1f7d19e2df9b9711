"""Which rows make which part."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.data.sources import InputFile
from batchrun.errors import ConfigError, InputError

# `datasets.load_dataset` takes every file below an output folder for data, whatever its ending, save those in
# hidden folders and in folders that begin with two underscores.
STATE_FOLDER = "__batchrun"
MANIFEST = f"{STATE_FOLDER}/manifest.json"
MAX_FILES = 100_000
MAX_CHUNKS_PER_FILE = 1_000_000
PART = re.compile(r"part-(\d{5})-(\d{6})\.parquet")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of one input file: the unit of work and of commit. `index` counts within the file.

    Each row makes `samples` rows of the output.
    """

    file: int
    index: int
    start: int
    stop: int
    samples: int = 1

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def results(self) -> int:
        """Rows of its part."""
        return self.rows * self.samples

    @property
    def part(self) -> str:
        """Name of the output part. Sorted names are in input order, within the limits that Plan checks."""
        return f"part-{self.file:05d}-{self.index:06d}.parquet"


class Plan:
    """All chunks of a job. Bounds follow from the files' row counts and `chunk_rows` alone, never from workers.

    Chunks are numbered from 0 in input order. Sets of them are arrays of numbers, int64 and ascending: a job may
    have millions, and a Chunk is made when its turn comes.
    A file without rows makes one chunk of none, so that its part exists and shows the schema. Each of the input's
    `rows` makes `samples` of the output's.
    Raises InputError or ConfigError where part names would no longer sort in input order.
    """

    def __init__(self, files: Sequence[InputFile], chunk_rows: int, samples: int = 1) -> None:
        self.files = files
        self.chunk_rows = chunk_rows
        self.samples = samples
        self.file_rows = np.array([file.rows for file in files], dtype=np.int64)
        counts = np.maximum(1, -(-self.file_rows // chunk_rows))
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # number of each file's first chunk
        self.rows = int(self.file_rows.sum())
        self.num_chunks = int(self.first[-1])
        if len(files) > MAX_FILES:
            raise InputError(f"input.path finds {len(files)} files, and a job takes at most {MAX_FILES}: split the job")
        for file, count in zip(files, counts.tolist(), strict=True):
            if count > MAX_CHUNKS_PER_FILE:
                enough = -(-file.rows // MAX_CHUNKS_PER_FILE)
                raise ConfigError(
                    f"output.chunk_rows={chunk_rows} cuts {file.name} into {count} parts, and a file makes "
                    f"at most {MAX_CHUNKS_PER_FILE}: use output.chunk_rows={enough} or more"
                )

    def chunk(self, number: int) -> Chunk:
        """The chunk of a number."""
        file = int(np.searchsorted(self.first, number, side="right")) - 1
        index = int(number - self.first[file])
        start = index * self.chunk_rows
        return Chunk(file, index, start, min(start + self.chunk_rows, int(self.file_rows[file])), self.samples)

    def number(self, part: str) -> int | None:
        """The number of the chunk that makes a part of this name, or None if no chunk does."""
        found = PART.fullmatch(part)
        if found is None or int(found[1]) >= len(self.file_rows):
            return None
        number = int(self.first[int(found[1])]) + int(found[2])
        return number if number < self.first[int(found[1]) + 1] else None

    def present(self, folder: str | os.PathLike[str]) -> np.ndarray:
        """Numbers of the chunks that have a part in `folder`, by name, ascending; int64 [n]. One listing."""
        with os.scandir(folder) as entries:
            found = [number for entry in entries if (number := self.number(entry.name)) is not None]
        return np.sort(np.array(found, dtype=np.int64))

    def share(self, index: int, count: int) -> np.ndarray:
        """Chunks of worker `index` of `count`: every count-th."""
        return np.arange(index, self.num_chunks, count, dtype=np.int64)

    def bounds(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(file, first row, row after the last) of each chunk, int64 [n]."""
        file = np.searchsorted(self.first, numbers, side="right") - 1
        start = (numbers - self.first[file]) * self.chunk_rows
        return file, start, np.minimum(start + self.chunk_rows, self.file_rows[file])

    @property
    def results(self) -> int:
        """Rows of the whole output."""
        return self.rows * self.samples

    def results_of(self, numbers: np.ndarray) -> int:
        """Rows in the parts of these chunks."""
        _, start, stop = self.bounds(numbers)
        return int((stop - start).sum()) * self.samples

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in input order, made as it is asked for."""
        return map(self.chunk, range(self.num_chunks))
