from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchrun.config import Config, identity
from batchrun.data.manifest import (
    build_manifest,
    check_manifest,
    fingerprint,
    plan_of,
    read_manifest,
    write_manifest,
)
from batchrun.data.plan import MANIFEST, Plan
from batchrun.data.sources import InputFile
from batchrun.errors import BatchrunError, FingerprintMismatch
from tests.data.test_plan import files


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


def test_settings_that_may_differ_are_not_compared() -> None:
    old = build_manifest({"sampling.max_tokens": 64, "prompt.template": "a"}, files(1))
    new = build_manifest({"sampling.max_tokens": 128, "prompt.template": "a"}, files(1))
    check_manifest(old, new, ["sampling.max_tokens"])
    other = build_manifest({"sampling.max_tokens": 128, "prompt.template": "b"}, files(1))
    with pytest.raises(FingerprintMismatch, match=r"prompt\.template") as caught:
        check_manifest(old, other, ["sampling.max_tokens"])
    assert "max_tokens" not in str(caught.value)
    with pytest.raises(FingerprintMismatch, match="input file"):
        check_manifest(old, build_manifest(old["settings"], files(2)), ["sampling.max_tokens"])


def test_the_plan_can_be_had_from_the_manifest() -> None:
    manifest = json.loads(json.dumps(build_manifest({"output.chunk_rows": 2}, files(5, 0, 4))))
    assert list(plan_of(manifest).chunks()) == list(Plan(files(5, 0, 4), 2).chunks())


@pytest.mark.parametrize("manifest", [{}, {"files": []}, {"files": [{"name": "a"}], "settings": {}}, {"files": 5}])
def test_a_manifest_without_its_plan_is_refused(manifest: dict[str, Any]) -> None:
    with pytest.raises(BatchrunError, match="is not a whole manifest of batchrun"):
        plan_of(manifest)
