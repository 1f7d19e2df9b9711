"""Models in llama.cpp's GGUF files, whose weights transformers unpacks into floats.

What else a model folder holds (config, tokenizer, end of turn, sampling) stands in the head of such a file. It is
written once into the user's cache as the small files of a folder, so that all but the weights is read as of any model.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchrun import __version__
from batchrun.assets import build_once, cache_folder
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

NOTES = "gguf.json"
# What transformers must have made of the file's `tokenizer.ggml.model`.
ALGORITHMS = {"gpt2": "BPE", "llama": "BPE", "gemma4": "BPE", "t5": "Unigram", "bert": "WordPiece"}
# Values of `tokenizer.ggml.pre` whose originals split text as GPT-2 does, and those that take digits one by one before.
GPT2_SPLITS = {None, "default", "gpt-2"}
DIGIT_SPLITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# generation_config.json's names of what `general.sampling.*` holds.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def find_gguf(folder: Path, model: str, name: str | None) -> Path | None:
    """The GGUF file in a folder that `model.path` and `model.gguf_file` mean, or None for another kind of model.

    Without a name it is the only one of a local folder that has no other weights. Raises ConfigError for a file that is
    not there, for two that are named, and if several could be meant.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if name not in (None, path.name):
            raise ConfigError(f"model={model} is a file, and model.gguf_file={name} names another: leave one out")
        return folder / path.name
    if name is not None:
        if not (folder / name).is_file():
            raise ConfigError(f"model.gguf_file={name} is not a file of model={model}")
        return folder / name
    # A folder of the hub's cache holds whatever was asked for once.
    if not path.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise ConfigError(
            f"model={model} holds {len(found)} GGUF files: choose one with model.gguf_file, such as {found[0].name}"
        )
    return found[0] if found else None


def open_gguf(path: Path, *, with_tokenizer: bool = True) -> Path:
    """The folder with the small files of a GGUF file's head: made once for each state of the file.

    Raises ConfigError as `unpack_head` does, and if the cache cannot be written.
    """
    import transformers

    stat = path.stat()
    state = (str(path), stat.st_size, stat.st_mtime_ns, with_tokenizer, transformers.__version__, __version__)
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    target = cache_folder() / "gguf" / f"{path.stem}-{key}"

    def build(_: Path, product: Path) -> None:
        parameters = unpack_head(path, product, with_tokenizer=with_tokenizer)
        (product / NOTES).write_text(json.dumps({"parameters": parameters}))

    try:
        return build_once(target, build)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error}): set BATCHRUN_CACHE to a folder that can") from error


def check_readers() -> None:
    """Raise ConfigError unless the packages are there that transformers reads GGUF files with."""
    if absent := [name for name in ("accelerate", "gguf") if find_spec(name) is None]:
        raise ConfigError(f"reading GGUF files takes {' and '.join(absent)}: run pip install 'batchrun[gguf]'")


def unpack_head(path: Path, folder: Path, *, with_tokenizer: bool = True) -> int:
    """Write a GGUF file's config, tokenizer, ends of sequences and sampling as the files of a model folder.

    Returns how many numbers its weights are. Raises ConfigError for a file that is damaged, is one part of several, has
    an architecture or a tokenizer that transformers does not read, or if a package that reads it is missing.
    """
    check_readers()
    head = _Head(path)
    config = head.read("AutoConfig")
    config.eos_token_id, config.dtype = head.ends(), head.dtype()
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    if with_tokenizer:
        tokenizer = head.read("AutoTokenizer")
        _settle(tokenizer, head)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(head.generation(), indent=1))
    return head.parameters


def float_bytes(folder: Path) -> int:
    """Bytes of the weights in 16-bit floats, of the model whose head `open_gguf` has put there."""
    return 2 * int(json.loads((folder / NOTES).read_text())["parameters"])


def loading_options(path: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained(path.parent, ...)` that unpack the weights of a GGUF file into floats."""
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name}
    # Releases that can keep the blocks of a file have this switch; earlier ones always unpack.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


@contextmanager
def no_bar() -> Iterator[None]:
    """No bar of unpacked tensors, which transformers draws by tqdm itself, even where stderr is a log file."""
    from transformers import modeling_gguf_pytorch_utils as reader

    drawn = reader.tqdm
    reader.tqdm = partial(drawn, disable=True)
    try:
        yield
    finally:
        reader.tqdm = drawn


def _settle(tokenizer: Any, head: _Head) -> None:
    """Make a tokenizer what the file says, where releases of transformers differ in what they read."""
    kind = head.value("tokenizer.ggml.model")
    made = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"]
    if made != ALGORITHMS.get(kind):
        raise ConfigError(
            f"{head.path}: its tokenizer is {ALGORITHMS.get(kind, kind)}, and this release of transformers makes "
            f"{made} of it, which gives other tokens: update transformers, or set model.tokenizer to the original's "
            "folder or hub id"
        )
    if (end := head.value("tokenizer.ggml.eos_token_id")) is not None:
        tokenizer.eos_token = head.token(end)
    tokenizer.pad_token = tokenizer.eos_token if (pad := head.padding()) is None else head.token(pad)
    tokenizer.clean_up_tokenization_spaces = False
    if kind == "gpt2":
        _settle_splits(tokenizer, head)


def _settle_splits(tokenizer: Any, head: _Head) -> None:
    from tokenizers import pre_tokenizers

    splits = head.value("tokenizer.ggml.pre")
    if splits in DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif splits not in GPT2_SPLITS | _known_splits():
        log.warning(
            "%s: this release of transformers does not know how its tokenizer splits text (%s), and takes GPT-2's way, "
            "which gives some texts other tokens. Set model.tokenizer to the original's folder or hub id",
            head.path,
            splits,
        )


def _known_splits() -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # of releases that know only Qwen's beside GPT-2's
        return {"qwen2"}
    return set(GGUF_PRE_TOKENIZER_SPLITS)


class _Head:
    """The metadata of a GGUF file. Raises ConfigError for one that is damaged or not whole."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise ConfigError(
                f"{path} is not a GGUF file, or is damaged or cut off ({error}): copy or download it again"
            ) from error
        self._fields = reader.fields
        self._types = {tensor.tensor_type.name for tensor in reader.tensors}
        self.parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        if (parts := self.value("split.count") or 1) > 1:
            raise ConfigError(
                f"{path} is one of {parts} parts of a GGUF model: join them with llama.cpp's `llama-gguf-split --merge`"
            )

    def value(self, name: str) -> Any:
        """A number, text or list of the metadata, or None."""
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def token(self, number: int) -> str:
        return str(self._fields["tokenizer.ggml.tokens"].contents(number))

    def ends(self) -> int | list[int] | None:
        """Ids that end a sequence, a turn or a message, of which chat models may have several; as configs hold them."""
        found = (self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        ids = list(dict.fromkeys(int(number) for number in found if number is not None))
        return ids if len(ids) > 1 else next(iter(ids), None)

    def dtype(self) -> str:
        """The type of weights that are plain floats; for packed ones that which models are usually published in."""
        if not self._types <= {"F32", "F16", "BF16"} or "BF16" in self._types:
            return "bfloat16"
        return "float16" if "F16" in self._types else "float32"

    def padding(self) -> int | None:
        return self.value("tokenizer.ggml.padding_token_id")

    def generation(self) -> dict[str, Any]:
        """What generation_config.json says of a model: ends, and how to sample if the file recommends it."""
        said = {name: self.value(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        said |= {"eos_token_id": self.ends(), "pad_token_id": self.padding()}
        said |= {
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "do_sample": bool(said["temperature"]) or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def read(self, auto_class: str) -> Any:
        """The transformers config or tokenizer that the file describes."""
        import transformers

        source = getattr(transformers, auto_class)
        try:
            # Alone in a folder: transformers prefers a tokenizer.json beside the file to what the file says.
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, self.path.name).symlink_to(self.path)
                return source.from_pretrained(folder, gguf_file=self.path.name, local_files_only=True)
        except (ValueError, KeyError, OSError, TypeError, AttributeError, NotImplementedError) as error:
            kind = self.value("general.architecture")
            raise ConfigError(
                f"{self.path}: this release of transformers cannot read a GGUF file of architecture {kind} ({error}): "
                "take the model's folder of safetensors"
            ) from error
