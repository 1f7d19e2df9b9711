from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.config import Config, identity
from batchrun.data import plan as plan_module
from batchrun.data.plan import (
    MANIFEST,
    Chunk,
    Plan,
    build_manifest,
    check_manifest,
    fingerprint,
    read_manifest,
    write_manifest,
)
from batchrun.data.sources import InputFile
from batchrun.errors import BatchrunError, ConfigError, FingerprintMismatch, InputError


def files(*rows: int) -> list[InputFile]:
    return [InputFile(i, f"/in/{i}.parquet", f"{i}.parquet", 100 + i, n, f"d{i}") for i, n in enumerate(rows)]


def test_chunks_in_input_order() -> None:
    plan = Plan(files(5, 0, 4), 2)
    assert list(plan.chunks()) == [
        Chunk(0, 0, 0, 2),
        Chunk(0, 1, 2, 4),
        Chunk(0, 2, 4, 5),
        Chunk(1, 0, 0, 0),
        Chunk(2, 0, 0, 2),
        Chunk(2, 1, 2, 4),
    ]
    assert (plan.num_chunks, plan.rows) == (6, 9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 12))
def test_chunks_cover_each_row_once(rows: list[int], chunk_rows: int) -> None:
    plan = Plan(files(*rows), chunk_rows)
    chunks = list(plan.chunks())
    covered = [(chunk.file, row) for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert covered == [(file, row) for file, count in enumerate(rows) for row in range(count)]
    assert len(chunks) == plan.num_chunks
    assert all(chunk.rows <= chunk_rows for chunk in chunks)
    parts = [chunk.part for chunk in chunks]
    assert parts == sorted(set(parts))


def test_part_name() -> None:
    assert Chunk(3, 12, 0, 1).part == "part-00003-000012.parquet"


def test_chunks_are_made_as_they_are_asked_for() -> None:
    plan = Plan(files(*[10**9] * 1000), 1000)
    assert plan.num_chunks == 10**9
    assert next(itertools.islice(plan.chunks(), 2, None)) == Chunk(0, 2, 2000, 3000)


def test_too_many_parts_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"output\.chunk_rows=1 cuts 0\.parquet into 3000000 parts.*chunk_rows=3 or"):
        Plan(files(3_000_000), 1)
    monkeypatch.setattr(plan_module, "MAX_FILES", 2)
    with pytest.raises(InputError, match="finds 3 files"):
        Plan(files(1, 1, 1), 1)


def test_fingerprint_depends_on_settings_and_input_identity_only() -> None:
    values = identity(Config())
    base = fingerprint(values, files(3))
    assert len(base) == 64
    assert int(base, 16) >= 0
    moved = [InputFile(0, "/elsewhere/0.parquet", "0.parquet", 100, 3, "d0")]
    assert fingerprint(dict(reversed(values.items())), moved) == base
    assert fingerprint({**values, "sampling.seed": 1}, files(3)) != base
    for other in [("1.parquet", 100, 3, "d0"), ("0.parquet", 101, 3, "d0"), ("0.parquet", 100, 2, "d0")]:
        assert fingerprint(values, [InputFile(0, "/in/0.parquet", *other)]) != base
    assert fingerprint(values, [InputFile(0, "/in/0.parquet", "0.parquet", 100, 3, "edited")]) != base


def test_fingerprint_of_equal_numbers_is_equal() -> None:
    assert fingerprint({"t": 0, "l": (1, 2)}, []) == fingerprint({"t": 0.0, "l": [1, 2.0]}, [])
    assert fingerprint({"t": 0.5}, []) != fingerprint({"t": 0}, [])
    assert fingerprint({"t": False}, []) != fingerprint({"t": 0}, [])


def test_manifest_is_created_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert read_manifest(folder) is None
    first = build_manifest({"sampling.temperature": 0.0, "prompt.template": "é {{ text }}"}, files(3), version="1")
    assert write_manifest(folder, first) is True
    assert write_manifest(folder, {"fingerprint": "other"}) is False
    assert read_manifest(folder) == first
    assert first["version"] == "1"
    assert os.listdir(folder / "__batchrun") == ["manifest.json"]


def test_manifest_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert write_manifest(tmp_path, {"fingerprint": "a"}) is True
    assert write_manifest(tmp_path, {"fingerprint": "b"}) is False
    assert read_manifest(tmp_path) == {"fingerprint": "a"}
    assert os.listdir(tmp_path / "__batchrun") == ["manifest.json"]


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_broken_manifest_names_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / MANIFEST
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(BatchrunError, match=r"manifest\.json.*another output\.path"):
        read_manifest(tmp_path)


def test_output_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert read_manifest(tmp_path / "out") is None
    with pytest.raises(BatchrunError, match=r"cannot write .*manifest\.json"):
        write_manifest(tmp_path / "out", {})


def mismatch(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    stored = json.loads(json.dumps(old))
    with pytest.raises(FingerprintMismatch) as caught:
        check_manifest(stored, new)
    first, *lines, last = str(caught.value).split("\n")
    assert first.endswith("other settings or other input:")
    assert "another output.path" in last
    return [line.strip() for line in lines]


def test_same_job_passes() -> None:
    values = identity(Config())
    check_manifest(json.loads(json.dumps(build_manifest(values, files(1)))), build_manifest(values, files(1)))


def test_each_changed_setting_has_a_line() -> None:
    old = build_manifest({"sampling.max_tokens": 64, "model.revision": None, "sampling.stop": []}, files(1))
    new = build_manifest({"sampling.max_tokens": 128, "model.revision": "main", "sampling.stop": ["é"]}, files(1))
    assert mismatch(old, new) == [
        'model.revision: null -> "main"',
        "sampling.max_tokens: 64 -> 128",
        'sampling.stop: [] -> ["é"]',
    ]


def test_long_values_are_cut_around_the_difference() -> None:
    text = "Classify the review. " * 50
    [line] = mismatch(
        build_manifest({"prompt.template": text + "Old ending"}, []),
        build_manifest({"prompt.template": text + "New ending"}, []),
    )
    assert "Old ending" in line
    assert "New ending" in line
    assert len(line) < 200


def test_changed_added_and_removed_files_have_a_line() -> None:
    old = files(3, 3, 3)
    new = [old[0], InputFile(1, "", "1.parquet", 999, 4, "x"), InputFile(2, "", "2.parquet", 102, 3, "edited")]
    assert mismatch(build_manifest({}, old), build_manifest({}, new)) == [
        "input file 1.parquet: changed (size 101 -> 999, rows 3 -> 4)",
        "input file 2.parquet: changed (other content)",
    ]
    renamed = InputFile(2, "", "z.parquet", 102, 3, "d2")
    assert mismatch(build_manifest({}, old), build_manifest({}, [*old[:2], renamed])) == [
        "input file 2.parquet: removed",
        "input file z.parquet: added",
    ]


def test_many_differences_are_counted() -> None:
    lines = mismatch(build_manifest({}, files(*[1] * 100)), build_manifest({}, []))
    assert len(lines) == 21
    assert lines[-1] == "and 80 more"


def test_unknown_difference_shows_both_fingerprints() -> None:
    assert mismatch({"fingerprint": "a"}, {"fingerprint": "b"}) == ["fingerprint: a -> b"]
