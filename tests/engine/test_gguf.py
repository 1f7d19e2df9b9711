"""Models in GGUF files run as those of folders do, and what cannot be read is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.config import EngineConfig, ModelConfig
from batchrun.engine import gguf as reading
from batchrun.engine.checkpoint import Checkpoint, eos_token_ids, generation_defaults, load_tokenizer, open_checkpoint
from batchrun.engine.gguf import loading_options, unpack_head
from batchrun.engine.model import choose_dtype
from batchrun.engine.params import SamplingParams
from batchrun.errors import ConfigError
from tests.engine.families import build_model, generate, load, make_tokenizer, random_prompt
from tests.engine.gguf_files import write_gguf

CPU = torch.device("cpu")
PROMPTS = [random_prompt(i, length) for i, length in enumerate((3, 9, 17))]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are whole blocks of quantised weights."""
    folder = tmp_path_factory.mktemp("wide")
    build_model("llama", intermediate_size=64).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def opened(path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(ModelConfig(str(path), **options))


def completions(path: Path, **options: Any) -> list[list[int]]:
    return [list(done.token_ids) for done in load(path, **options).generate(PROMPTS, GREEDY)]


def test_a_file_of_floats_is_the_model_it_was_made_of(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    expected = [generate(model, prompt, 8) for prompt in PROMPTS]
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    for name, options in ((path, {}), (path.parent, {}), (path.parent, {"gguf_file": "tiny.gguf"})):
        assert completions(name, **options) == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_unpacked_as_transformers_unpacks_them(kind: str, wide: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", wide, gguf.GGMLQuantizationType[kind])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **loading_options(path))
    assert completions(path) == [generate(model, prompt, 8) for prompt in PROMPTS]
    assert opened(path).weight_bytes() == 2 * sum(x.numel() for x in model.parameters())


def test_the_head_is_read_as_a_folder_s_small_files_are(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, tokenizer__ggml__eot_token_id=7, general__sampling__top_k=20)
    checkpoint = opened(path)
    tokenizer = load_tokenizer(checkpoint)
    assert checkpoint.name == "tiny.gguf"
    assert checkpoint.max_model_len == 512
    assert tokenizer.decode(tokenizer.encode("to go")) == "to go"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<pad>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False) == "go"
    assert eos_token_ids(checkpoint, tokenizer) == {1, 7}
    assert generation_defaults(checkpoint)["temperature"] == 0
    assert generation_defaults(checkpoint)["top_k"] == 20


def test_a_recommended_temperature_is_the_model_s_way_to_sample(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, general__sampling__temp=0.5)
    assert generation_defaults(opened(path))["temperature"] == 0.5


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(None, torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)],
)
def test_the_type_of_numbers_is_that_of_the_file(
    kind: str | None, dtype: torch.dtype, wide: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", wide, None if kind is None else gguf.GGMLQuantizationType[kind])
    assert choose_dtype("auto", opened(path), torch.device("cuda"), EngineConfig()) == dtype


@pytest.mark.parametrize(("splits", "pieces"), [("smollm", ["a", "Ġ", "1", "2"]), ("gpt-2", ["a", "Ġ12"])])
def test_text_is_split_as_the_file_says(splits: str, pieces: list[str], llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, tokenizer__ggml__pre=splits)
    split = load_tokenizer(opened(path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12")
    assert [piece for piece, _ in split] == pieces


def test_an_unknown_way_to_split_is_told(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(write_gguf(tmp_path / "tiny.gguf", llama, tokenizer__ggml__pre="odd"))
    assert "does not know how its tokenizer splits text (odd)" in caplog.text
    assert "Set model.tokenizer" in caplog.text


def test_the_head_is_written_once_for_each_state_of_the_file(llama: Path, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    first = opened(path)
    assert opened(path).folder == first.folder
    write_gguf(path, llama, tokenizer__ggml__eos_token_id=9)
    os.utime(path, ns=(1, 1))
    second = opened(path)
    assert second.folder != first.folder
    assert eos_token_ids(second, load_tokenizer(second)) == {9}
    assert sorted((cache / "gguf").glob("tiny-*")) == sorted((first.folder, second.folder))


def test_what_the_file_holds_makes_another_model_and_its_name_does_not(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    other = write_gguf(tmp_path / "other.gguf", llama, tokenizer__ggml__eos_token_id=9)
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    assert opened(Path(copy)).identity() == opened(path).identity() != opened(other).identity()


def test_another_tokenizer_takes_the_place_of_one_that_cannot_be_read(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, tokenizer__ggml__model="odd")
    with pytest.raises(ConfigError, match=r"tiny\.gguf: .*odd"):
        opened(path)
    assert load_tokenizer(opened(path, tokenizer=str(llama))).convert_tokens_to_ids("w5") == 5


def test_a_tokenizer_that_transformers_makes_another_of_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reading.ALGORITHMS, "gpt2", "Unigram")
    with pytest.raises(ConfigError, match=r"its tokenizer is Unigram, and .* makes BPE of it.*set model\.tokenizer"):
        opened(write_gguf(tmp_path / "tiny.gguf", llama))


def test_files_that_are_not_there_or_not_chosen_are_named(llama: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: choose one with model\.gguf_file, such as a\.gguf"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.gguf_file=c\.gguf is not a file of model="):
        opened(tmp_path, gguf_file="c.gguf")
    with pytest.raises(ConfigError, match=r"a\.gguf is a file, and model\.gguf_file=b\.gguf names another"):
        opened(tmp_path / "a.gguf", gguf_file="b.gguf")
    with pytest.raises(ConfigError, match=r"c\.gguf is neither a folder .* nor a GGUF file"):
        opened(tmp_path / "c.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json.*if the model is in a GGUF file, name it"):
        opened(tmp_path / "empty")


def test_weights_of_a_folder_come_before_a_gguf_file_beside_them(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "both"))
    write_gguf(folder / "tiny.gguf", llama)
    assert opened(folder).gguf is None
    named = opened(folder, gguf_file="tiny.gguf")
    assert named.gguf == folder / "tiny.gguf"
    assert load_tokenizer(named).convert_tokens_to_ids("to") == 255, "the tokenizer is the file's, not the folder's"


@pytest.mark.parametrize("rest", [0, 3, 100, 20000])
def test_a_damaged_file_is_named(rest: int, llama: Path, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    path.write_bytes(path.read_bytes()[:rest])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is not a GGUF file, or is damaged or cut off .*: copy"):
        opened(path)
    assert not any((cache / "gguf").glob("tiny-*"))


def test_a_part_of_several_is_told_how_they_are_joined(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny-00001-of-00003.gguf", llama, split__count=3)
    with pytest.raises(ConfigError, match=r"is one of 3 parts of a GGUF model: .* `llama-gguf-split --merge`"):
        opened(path)


def test_an_architecture_that_transformers_does_not_read_is_named(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, general__architecture="strange")
    with pytest.raises(ConfigError, match=r"cannot read a GGUF file of architecture strange .*folder of safetensors"):
        opened(path)


def test_missing_packages_are_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(ConfigError, match=r"reading GGUF files takes gguf: run pip install 'batchrun\[gguf\]'"):
        unpack_head(tmp_path / "tiny.gguf", tmp_path / "head")


def test_a_cache_that_cannot_be_written_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written .*: set BATCHRUN_CACHE"):
        opened(write_gguf(tmp_path / "tiny.gguf", llama))


def test_no_bar_of_tensors_is_drawn(wide: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", wide, gguf.GGMLQuantizationType.Q8_0)
    load(path)
    assert "quantizing" not in capfd.readouterr().err
