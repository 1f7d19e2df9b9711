"""Which rows of the files are the input's: `input.filter`, `input.sample` and `input.limit`, decided before the run.

A selected row has a number of its own among the selected rows of its file, and chunks are ranges of those numbers.
What is remembered is how many rows of each block of a file are selected; which ones follows from the rows again
whenever they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchrun.data.filters import Filter
from batchrun.data.formats.base import ROW_ERROR, RowRange
from batchrun.errors import InputError

BLOCK_ROWS = 8192

ReadRows = Callable[[Sequence[RowRange]], Iterable[tuple[int, pa.RecordBatch]]]


class Sample:
    """A part of all rows, decided by a hash of the seed, the file's name and the row's number in it.

    Below 1, `size` is the share of rows; from 1 on, their number. The same row is in the sample whoever asks, and a
    larger share contains a smaller one.
    """

    def __init__(self, size: float, seed: int) -> None:
        self.count = int(size) if size >= 1 else None
        self.seed = seed
        self.threshold = np.uint64(2**64 - 1) if size >= 1 else np.uint64(int(size * 2**64))

    def ranks(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A hash uint64 [n] of each row number int64 [n]: the lowest are in the sample.

        The mixing is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014).
        """
        key = hashlib.blake2b(f"{self.seed}\x1f{name}".encode(), digest_size=8).digest()
        with np.errstate(over="ignore"):
            x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "little"))
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class FileToSelect:
    """One file as selection sees it: how many rows it has, and how to read the columns of the filter."""

    name: str
    rows: int
    may_match: Sequence[RowRange]
    read: ReadRows


class Selection:
    """The selected rows of every file."""

    def __init__(self, filter: Filter | None, sample: Sample | None) -> None:
        self.filter = filter
        self.sample = sample
        self._before: list[np.ndarray] = []  # by file: selected rows before each block, int64 [blocks + 1]

    def scan(self, files: Sequence[FileToSelect], limit: int | None) -> list[int]:
        """Find the selected rows of all files; returns how many each has, `limit` in all at most."""
        found = [np.zeros(-(-file.rows // BLOCK_ROWS), np.int64) for file in files]
        if self.sample is not None and self.sample.count is not None:
            self._choose(files, self.sample.count)
        left = limit
        for file, blocks in zip(files, found, strict=True):
            for first, rows in self._passing(file):
                # A block counts only when it was scanned to its end: reading it again must find as many.
                if left is not None and blocks[: first // BLOCK_ROWS].sum() >= left:
                    break
                blocks += np.bincount(rows // BLOCK_ROWS, minlength=len(blocks))
            if left is not None:
                left -= min(left, int(blocks.sum()))
        self._before = [np.concatenate([[0], np.cumsum(blocks)]) for blocks in found]
        counts, left = [], limit
        for before in self._before:
            counts.append(int(before[-1]) if left is None else min(left, int(before[-1])))
            left = None if left is None else left - counts[-1]
        return counts

    def _choose(self, files: Sequence[FileToSelect], count: int) -> None:
        """Set the sample's threshold so that `count` rows that meet the filter have a lower rank."""
        assert self.sample is not None, "a count is a sample's"
        self.sample.threshold = np.uint64(2**64 - 1)
        lowest = np.empty(0, np.uint64)
        for file in files:
            for _, rows in self._passing(file):
                lowest = np.concatenate([lowest, self.sample.ranks(file.name, rows)])
                if len(lowest) > 2 * count + BLOCK_ROWS:
                    lowest = np.partition(lowest, count)[: count + 1]
        if len(lowest) > count:
            self.sample.threshold = np.partition(lowest, count)[count]

    def _passing(self, file: FileToSelect) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, numbers of the selected rows int64) of a batch at a time."""
        if self.filter is None:
            for start in range(0, file.rows, BLOCK_ROWS):
                rows = np.arange(start, min(start + BLOCK_ROWS, file.rows))
                yield start, rows[self._sampled(file.name, rows)]
            return
        for first, batch in file.read(file.may_match):
            yield first, first + np.flatnonzero(self._mask(file.name, first, batch))

    def _sampled(self, name: str, rows: np.ndarray) -> np.ndarray:
        return (
            np.ones(len(rows), bool) if self.sample is None else self.sample.ranks(name, rows) < self.sample.threshold
        )

    def _mask(self, name: str, first: int, batch: pa.RecordBatch) -> np.ndarray:
        """Which rows of a batch are selected, bool [n]. A broken row meets every filter: it must be reported."""
        mask = self._sampled(name, np.arange(first, first + batch.num_rows))
        if self.filter is not None:
            meets = self.filter.mask(batch)
            if ROW_ERROR in batch.schema.names:
                meets = pc.or_(meets, pc.is_valid(batch.column(ROW_ERROR)))
            mask &= meets.to_numpy(zero_copy_only=False)
        return mask

    def read(
        self, file: int, name: str, rows: int, ranges: Sequence[RowRange], read: ReadRows
    ) -> Iterator[tuple[int, np.ndarray, pa.RecordBatch]]:
        """(number of the first row, numbers in the file int64 [n], selected rows) covering at least `ranges`.

        `read` reads row ranges of the file with the filter's columns among others. Raises InputError if other rows
        are selected than when the file was scanned.
        """
        before = self._before[file]
        runs = list(_block_runs(before, ranges))
        batches = read([(start * BLOCK_ROWS, min(stop * BLOCK_ROWS, rows)) for start, stop in runs])
        at, number = 0, int(before[runs[0][0]])
        for first, batch in batches:
            while first >= runs[at][1] * BLOCK_ROWS:
                _check_count(name, number, before[runs[at][1]])
                at += 1
                number = int(before[runs[at][0]])
            chosen = np.flatnonzero(self._mask(name, first, batch))
            if len(chosen):
                yield number, first + chosen, batch.take(pa.array(chosen))
                number += len(chosen)
        _check_count(name, number, before[runs[at][1]])


def _check_count(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise InputError(f"{name}: other rows meet the filter than before: the file changed while the job ran")


def _block_runs(before: np.ndarray, ranges: Sequence[RowRange]) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring blocks, none without selected rows, that hold the numbers in `ranges`."""
    run: tuple[int, int] | None = None
    done = 0
    for low, high in ranges:
        block = max(done, int(np.searchsorted(before, low, "right")) - 1)
        while block < len(before) - 1 and before[block] < high:
            if before[block + 1] > before[block]:
                if run is not None and run[1] == block:
                    run = run[0], block + 1
                else:
                    if run is not None:
                        yield run
                    run = block, block + 1
            block += 1
        done = block
    if run is not None:
        yield run
