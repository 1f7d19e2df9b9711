"""A job killed at every named point and at any time: what was saved is not made again, and the end is the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchrun.config import Config
from batchrun.data.journal import _lines
from batchrun.engine.seeds import row_seed, sample_seed
from tests import fake
from tests.engine.families import make_model
from tests.test_runner import job, write_input

ROWS, FILES, PARTS = 120, 2, 4
FAULTS = (
    "manifest_before_publish",
    "manifest_after_publish",
    "journal_before_write",
    "journal_torn",
    "journal_after_write",
    "journal_before_delete",
    "before_write",
    "after_write",
    "after_verify",
    "after_rename",
)
LABELS = ["w7", "w8 w9", "w10"]
IDS = {fake.words(i): i for i in range(ROWS)}

Item = tuple[int, int]  # a row, and which of its samples


@pytest.fixture(scope="session")
def server() -> Any:
    """Processes that start with everything imported, from a parent that has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fake", "batchrun.runner", "pyarrow.parquet"])
    return context


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Crashing:
    """One job that is started over and over, and the rows that it may make no more. All jobs make ROWS rows."""

    def __init__(self, server: Any, model: Path, folder: Path, task: str, samples: int) -> None:
        self.server = server
        self.samples = samples
        self.rows = ROWS // samples
        self.output = folder / "out"
        self.log = folder / "completed.log"
        source = write_input(folder / "in", [fake.words(i) for i in range(self.rows)], files=FILES)
        self.config: Config = job(
            model,
            source,
            self.output,
            output__chunk_rows=16 // samples,
            output__journal_seconds=0.01,
            report__metrics=False,
            sampling__n=samples,
            sampling__temperature=float(samples > 1),
            choose__labels=LABELS if task == "choose" else None,
        )
        self.config.task = task
        self.seeds = {0: 0} if samples == 1 else {self.seed(item): item[1] for item in self.items()}
        self.kills = 0

    def start(self, fault: str = "", after: float | None = None, seconds: float = 0.004, bad: int = 0) -> int | None:
        """Run the job, to be killed at a named point or after a time, and check what it made against what was saved."""
        saved = self.saved()
        self.log.unlink(missing_ok=True)
        environment = {
            "BATCHRUN_FAULT": fault,
            "BATCHRUN_FAKE_LOG": str(self.log),
            "BATCHRUN_FAKE_SECONDS": str(seconds),
            "BATCHRUN_FAKE_BAD": str(bad),
        }
        process = self.server.Process(target=fake.run_job, args=(self.config,), kwargs=environment)
        process.start()
        process.join(timeout=after if after is not None else 60)
        if process.exitcode is None:
            process.kill()
            process.join()
        self.kills += process.exitcode == -signal.SIGKILL
        made = self.made()
        assert not saved & made.keys(), f"rows {sorted(saved & made.keys())} were on disk and made again"
        assert set(made.values()) <= {1}
        return process.exitcode

    def items(self) -> list[Item]:
        """What the job is to make, in its order."""
        return [(row, sample) for row in range(self.rows) for sample in range(self.samples)]

    def place(self, row: int) -> tuple[str, int]:
        file, number = divmod(row, self.rows // FILES)
        return f"rows-{file}.parquet", number

    def seed(self, item: Item) -> int:
        return sample_seed(row_seed(0, *self.place(item[0])), item[1])

    def answer(self, item: Item) -> str:
        """What the job is to say of an item."""
        ids = fake.words(item[0]).replace("w", "").split()
        if self.config.task == "choose":
            return LABELS[fake.likeliest(ids, len(LABELS))]
        return fake.answer(ids) + (f"~{self.seed(item)}" if self.samples > 1 else "")

    def made(self) -> Counter[Item]:
        """What the engine completed in the last run, by how often."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        words = [line.split() for line in lines]
        return Counter((IDS[" ".join(f"w{token}" for token in ids)], self.seeds[int(seed)]) for *ids, seed in words)

    def saved(self) -> set[Item]:
        """What lies in a part or in a journal, without that which a retry is to make again."""
        rows: set[Item] = set()
        for part in self.output.glob("part-*.parquet"):
            table = pq.read_table(part)
            if self.config.retry:
                table = table.filter(pc.equal(table["status"], "ok"))
            samples = table["sample"].to_pylist() if self.samples > 1 else [0] * len(table)
            rows |= {(IDS[text], sample) for text, sample in zip(table["text"].to_pylist(), samples, strict=True)}
        for path in (self.output / "__batchrun" / "journal").glob("*"):
            lines = list(_lines(path))
            for block in lines[1:]:
                first = lines[0]["chunk"]["file"] * (self.rows // FILES)
                rows |= {(first + row, sample) for row, sample in zip(block["rows"], block["sample"], strict=True)}
        return rows

    def check_end(self) -> None:
        """The output is exactly what it has to be, and nothing else is left."""
        parts = sorted(self.output.glob("part-*"))
        assert [part.name for part in parts] == [
            f"part-{f:05d}-{i:06d}.parquet" for f in range(FILES) for i in range(PARTS)
        ]
        tables = [pq.read_table(part, page_checksum_verification=True) for part in parts]
        assert len({table.schema.remove_metadata() for table in tables}) == 1
        rows = [row for table in tables for row in table.to_pylist()]
        assert [(IDS[row["text"]], row.get("sample", 0)) for row in rows] == self.items()
        column = "label" if self.config.task == "choose" else "completion"
        assert [row[column] for row in rows] == list(map(self.answer, self.items()))
        assert [(row["source_file"], row["source_row"]) for row in rows] == [self.place(i) for i, _ in self.items()]
        leftovers = [path for path in self.output.rglob("*") if path.name.endswith(".tmp")]
        assert leftovers == []
        assert list((self.output / "__batchrun" / "journal").iterdir()) == []
        assert json.loads((self.output / "__batchrun" / "manifest.json").read_text())["plan"]["rows"] == self.rows


@pytest.fixture
def task() -> str:
    return "generate"


@pytest.fixture
def samples() -> int:
    return 1


@pytest.fixture
def crashing(server: Any, tiny: Path, tmp_path: Path, task: str, samples: int) -> Crashing:
    return Crashing(server, tiny, tmp_path, task, samples)


@pytest.mark.parametrize(("task", "samples"), [("generate", 1), ("generate", 3), ("choose", 1)])
@pytest.mark.parametrize("point", FAULTS)
def test_killed_at_each_point(crashing: Crashing, point: str) -> None:
    nth = 1
    while crashing.start(f"{point}:{nth}") != 0:
        nth += nth
        assert nth < 1000
    assert crashing.kills >= 1, f"{point} is never passed"
    crashing.check_end()


def killed_at_random(crashing: Crashing, seed: int) -> None:
    random_ = random.Random(seed)
    while True:
        if random_.random() < 0.5:
            code = crashing.start(f"{random_.choice(FAULTS)}:{random_.randint(1, 6)}")
        else:
            code = crashing.start(after=random_.uniform(0.15, 0.7), seconds=0.02)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    crashing.check_end()


@pytest.mark.parametrize(("seed", "samples"), [(seed, 1 + seed % 2 * 2) for seed in range(10)])
def test_killed_at_random_times(crashing: Crashing, seed: int) -> None:
    killed_at_random(crashing, seed)


@pytest.mark.parametrize("task", ["choose"])
def test_killed_at_random_times_while_choosing(crashing: Crashing) -> None:
    killed_at_random(crashing, 0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("seed", "samples"), [(seed, 1 + seed % 2 * 2) for seed in range(10, 200)])
def test_killed_at_random_times_many_times(crashing: Crashing, seed: int) -> None:
    killed_at_random(crashing, seed)


@pytest.mark.parametrize(
    ("point", "task", "samples"),
    [
        *((point, "generate", 1) for point in FAULTS if not point.startswith("manifest")),
        *((point, *how) for point in ("journal_torn", "after_rename") for how in (("generate", 3), ("choose", 1))),
    ],
)
def test_killed_at_each_point_of_a_retry(crashing: Crashing, point: str) -> None:
    assert crashing.start(bad=3) == 0
    failed = {(row, sample) for row, sample in crashing.items() if (row % 200 + 4) % 3 == 0}
    assert crashing.made().keys() == set(crashing.items())
    crashing.config.retry = ["error"]
    made: set[Item] = set()
    nth = 1
    while crashing.start(f"{point}:{nth}") != 0:
        made |= crashing.made().keys()
        assert made <= failed
        assert sum(pq.read_metadata(part).num_rows for part in crashing.output.glob("part-*")) == ROWS
        nth += nth
    assert made | crashing.made().keys() == failed
    assert crashing.kills >= 1, f"{point} is never passed"
    crashing.check_end()


def test_killed_workers_are_followed_by_fewer(crashing: Crashing) -> None:
    for index in range(4):
        crashing.config.launch.index, crashing.config.launch.count = index, 4
        assert crashing.start("after_rename" if index % 2 else "") == (-signal.SIGKILL if index % 2 else 0)
    for index in range(2):
        crashing.config.launch.index, crashing.config.launch.count = index, 2
        assert crashing.start() == 0
    crashing.check_end()


def test_a_journal_with_a_torn_end_is_used_up_to_there(crashing: Crashing) -> None:
    assert crashing.start("journal_after_write:3") == -signal.SIGKILL
    for path in (crashing.output / "__batchrun" / "journal").iterdir():
        with open(path, "ab") as file:
            file.write(b'deadbeef {"rows":[1,2')
    assert crashing.saved()
    assert crashing.start() == 0
    crashing.check_end()


def test_a_finished_job_makes_nothing(crashing: Crashing) -> None:
    assert crashing.start() == 0
    assert sum(crashing.made().values()) == ROWS
    before = {path: os.stat(path).st_mtime_ns for path in crashing.output.glob("part-*")}
    assert crashing.start() == 0
    assert not crashing.made()
    assert {path: os.stat(path).st_mtime_ns for path in crashing.output.glob("part-*")} == before
