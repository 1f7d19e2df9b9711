"""What ships with the package is found, and what is built once is built once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from batchrun.assets import asset, build_once, cache_folder
from batchrun.errors import BatchrunError


def test_two_builders_of_one_target_build_it_once(tmp_path: Path):
    built: list[Path] = []
    start = threading.Barrier(2)

    def build(downloads: Path, product: Path) -> None:
        built.append(product)
        product.mkdir()
        (product / "weights").write_text("whole")

    def prepare() -> None:
        start.wait()
        build_once(tmp_path / "models" / "m", build)

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "models" / "m" / "weights").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing_to_be_mistaken_for_the_product(tmp_path: Path):
    def build(downloads: Path, product: Path) -> None:
        product.mkdir()
        raise BatchrunError("half way")

    with pytest.raises(BatchrunError, match="half way"):
        build_once(tmp_path / "models" / "m", build)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"BATCHRUN_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/batchrun"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/batchrun"),
        ({"HOME": "/h"}, "/h/.cache/batchrun"),
    ],
)
def test_cache_folder(environment: dict[str, str], folder: str, monkeypatch):
    for name in ("BATCHRUN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_assets_are_found_and_an_unknown_one_is_named():
    assert (asset("conf") / "config.yaml").is_file()
    assert (asset("jobs") / "demo.yaml").is_file()
    with pytest.raises(FileNotFoundError, match="the folder nothing is neither at"):
        asset("nothing")
