"""The wheel and the sdist hold what the checkout holds, and work from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import batchrun
from batchrun.compose import choices

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted(path.name for path in (ROOT / "jobs").iterdir())


def python(*words: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with what is installed under `path` before everything else."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def build(source: Path, folder: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(folder), str(source)]
    subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed where only PYTHONPATH finds it."""
    target = tmp_path_factory.mktemp("site")
    [wheel] = distributions.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=True)
    return target


def test_wheel_holds_both_packages_and_the_assets(distributions: Path):
    [wheel] = distributions.glob(f"batchrun-{batchrun.__version__}-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"batchrun/_jobs/{name}" for name in JOBS} <= names
    conf = [path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")]
    assert {f"batchrun/_conf/{path.as_posix()}" for path in conf} <= names
    assert "batchrun_kernels/__init__.py" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"batchrun", "batchrun_kernels", f"batchrun-{batchrun.__version__}.dist-info"}


def test_sdist_holds_what_a_checkout_needs(distributions: Path):
    [sdist] = distributions.glob("*.tar.gz")
    top = f"batchrun-{batchrun.__version__}"
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "conf/config.yaml"):
        assert f"{top}/{name}" in names
    assert {f"{top}/jobs/{name}" for name in JOBS} <= names
    assert f"{top}/tests/test_packaging.py" in names


def test_the_installed_wheel_works_from_an_empty_folder(installed: Path, tmp_path: Path):
    shown = python("-m", "batchrun", "--help", cwd=tmp_path, path=installed)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(f"  {job} " in shown.stdout for job in choices().jobs)
    composed = python("-m", "batchrun", "--cfg", "job=annotate", cwd=tmp_path, path=installed)
    assert (composed.returncode, composed.stderr) == (0, "")
    assert f"template_file: {installed / 'batchrun' / '_jobs' / 'annotate.j2'}" in composed.stdout
    where = python("-c", "import batchrun_kernels as k; print(k.__file__)", cwd=tmp_path, path=installed)
    assert where.stdout.strip() == str(installed / "batchrun_kernels" / "__init__.py")
    assert list(tmp_path.iterdir()) == []


def test_the_unpacked_sdist_works_from_an_empty_folder(distributions: Path, tmp_path: Path):
    [sdist] = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    root = tmp_path / "unpacked" / f"batchrun-{batchrun.__version__}"
    empty = tmp_path / "empty"
    empty.mkdir()
    composed = python("-m", "batchrun", "--cfg", "job=annotate", cwd=empty, path=root)
    assert (composed.returncode, composed.stderr) == (0, "")
    assert f"template_file: {root / 'jobs' / 'annotate.j2'}" in composed.stdout


def test_our_kernels_folder_is_not_taken_for_another_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    program = (
        "from transformers.utils import import_utils\n"
        "import batchrun_kernels, importlib.metadata\n"
        "names = importlib.metadata.packages_distributions()\n"
        "assert import_utils.is_kernels_available() == ('kernels' in names)\n"
    )
    done = python("-c", program, cwd=ROOT, path=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_of_the_distribution_is_the_package_s():
    from importlib.metadata import version

    assert version("batchrun") == batchrun.__version__
