from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchrun.data.paths import expand_braces, find_files
from batchrun.errors import InputError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found(folder: Path, *patterns: str) -> list[str]:
    paths = find_files([str(folder / pattern) for pattern in patterns], ".parquet")
    return [os.path.relpath(path, folder) for path in paths]


def test_folder_is_searched_to_any_depth_without_hidden_names(tmp_path: Path) -> None:
    touch(tmp_path, "b.parquet", "k=1/a.parquet", "k=1/.a.parquet", "_state/x.parquet", ".git/y.parquet", "README.md")
    touch(tmp_path, "_b.parquet", "k=2/deep/er/c.parquet")
    assert found(tmp_path, "") == ["b.parquet", "k=1/a.parquet", "k=2/deep/er/c.parquet"]


def test_folder_below_a_hidden_one_is_searched(tmp_path: Path) -> None:
    touch(tmp_path, "_cache/.data/a.parquet")
    assert found(tmp_path, "_cache/.data") == ["_cache/.data/a.parquet"]
    assert found(tmp_path, "_cache/.data/*.parquet") == ["_cache/.data/a.parquet"]


def test_globs(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.parquet", "k=1/c.parquet", "k=2/d.parquet", "__batchrun/m.parquet", "_x.parquet")
    assert found(tmp_path, "*.parquet") == ["a.parquet", "b.parquet"]
    assert found(tmp_path, "**/*.parquet") == ["a.parquet", "b.parquet", "k=1/c.parquet", "k=2/d.parquet"]
    assert found(tmp_path, "[b-z].parquet") == ["b.parquet"]
    assert found(tmp_path, "k=?/*") == ["k=1/c.parquet", "k=2/d.parquet"]
    assert found(tmp_path, "_*.parquet") == ["_x.parquet"]


def test_glob_that_matches_folders_searches_them(tmp_path: Path) -> None:
    touch(tmp_path, "k=1/c.parquet", "k=1/README.md", "k=2/deep/d.parquet")
    assert found(tmp_path, "k=*") == ["k=1/c.parquet", "k=2/deep/d.parquet"]


def test_literal_path_wins_over_its_reading_as_a_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "[0-9].parquet", "1.parquet", "{a,b}.parquet", "a.parquet", "b.parquet")
    assert found(tmp_path, "[0-9].parquet") == ["[0-9].parquet"]
    assert found(tmp_path, "{a,b}.parquet") == ["{a,b}.parquet"]


def test_several_paths_are_sorted_and_each_file_comes_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.parquet", "c.txt")
    assert found(tmp_path, "c.txt", "b.parquet", "*.parquet", "./a.parquet") == ["a.parquet", "b.parquet", "c.txt"]


def test_link_to_a_parent_ends(tmp_path: Path) -> None:
    touch(tmp_path, "data/a.parquet")
    os.symlink(tmp_path / "data", tmp_path / "data" / "again")
    assert found(tmp_path, "data") == ["data/a.parquet"]


def test_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    touch(tmp_path, "store/a.parquet", "data/b.parquet")
    os.symlink(tmp_path / "store", tmp_path / "data" / "linked")
    assert found(tmp_path, "data") == ["data/b.parquet", "data/linked/a.parquet"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{a,b}/x", ["a/x", "b/x"]),
        ("{a,b}{1,2}", ["a1", "a2", "b1", "b2"]),
        ("{a,{b,c}}x", ["ax", "bx", "ax", "cx"]),
        ("part-{08..11}", ["part-08", "part-09", "part-10", "part-11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{plain}", ["{plain}"]),
        ("{,.old}", ["", ".old"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert sorted(set(expand_braces(pattern))) == sorted(set(expected))


def test_each_alternative_must_exist(tmp_path: Path) -> None:
    touch(tmp_path, "part-0.parquet", "part-2.parquet")
    with pytest.raises(InputError, match=r"part-1\.parquet finds no file"):
        found(tmp_path, "part-{0..2}.parquet")


def test_nothing_found_names_pattern_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        find_files(["data/*.parquet"], ".parquet")
    assert "data/*.parquet finds no file" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_folder_without_files(tmp_path: Path) -> None:
    touch(tmp_path, "_state/a.parquet")
    with pytest.raises(InputError, match=r"is a folder without any \*\.parquet file"):
        found(tmp_path, "")
