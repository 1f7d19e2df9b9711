"""`mode=plan` and `mode=preview`: what they say, and that they need no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import dry
from tests.engine.families import make_model
from tests.test_runner import job, words, write_input

LLAMA_2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def llama_2_7b(smollm2: Path, tmp_path: Path) -> Path:
    """The config of Llama-2-7B with another model's tokenizer, and no weights."""
    folder = tmp_path / "llama-2-7b"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder)
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def test_plan_shows_the_kv_cost_of_a_known_model(
    llama_2_7b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", words(300), files=2)
    changes = {"model__dtype": "bfloat16", "engine__kv_cache_gib": 32, "engine__max_num_seqs": 256}
    assert dry.plan(job(llama_2_7b, source, tmp_path / "out", **changes)) == 0
    shown = capsys.readouterr().out
    assert "2 (K and V) x 32 layers x 32 KV heads x 128 dimensions x 2 bytes = 524,288 bytes = 0.5 MiB a token" in shown
    assert "16 x 4,096 tokens take 32.00 GiB" in shown
    assert "6,738 M parameters" in shown
    assert "rows-1.parquet: 150 rows" in shown
    assert "chunks      6 of up to 64 rows" in shown
    assert not (tmp_path / "out").exists()


def test_plan_shows_what_layers_with_a_window_keep(
    llama_2_7b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (llama_2_7b / "config.json").write_text(json.dumps(GEMMA_3_1B))
    source = write_input(tmp_path / "in", words(3))
    changes = {"model__dtype": "bfloat16", "engine__kv_cache_gib": 1, "sampling__max_tokens": 8000}
    dry.plan(job(llama_2_7b, source, tmp_path / "out", **changes))
    shown = capsys.readouterr().out
    assert "2 (K and V) x 26 layers x 1 KV heads x 256 dimensions x 2 bytes = 26,624 bytes" in shown
    assert "22 of the 26 layers keep the last 512 tokens only" in shown
    assert "1 x 32,768 tokens take 0.14 GiB" in shown
    assert "1.00 GiB on cpu hold 23 rows of 8,100 tokens" in shown  # five if every layer kept all tokens


def test_plan_counts_tokens_and_shared_prefixes(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", ["same beginning of every row " * 10 + str(i) for i in range(50)])
    dry.plan(job(smollm2, source, tmp_path / "out"))
    shown = capsys.readouterr().out
    assert "(50 of 50 rows sampled)" in shown
    assert "9" in shown.partition("; ")[2].partition("%")[0]


def test_plan_says_when_rows_make_no_prompt(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry.plan(job(smollm2, write_input(tmp_path / "in", [None, ""]), tmp_path / "out"))
    assert "none of the 2 sampled rows makes a prompt" in capsys.readouterr().out


def test_preview_shows_special_tokens_and_needs_no_weights(
    llama_2_7b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", ["first row", None, "third row", "fourth row"])
    config = job(llama_2_7b, source, tmp_path / "out", prompt__kind="chat", prompt__system="Be brief.")
    assert dry.preview(config) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst row<|im_end|>" in shown
    assert "rows-0.parquet row 1: 0 tokens\nempty_prompt" in shown
    assert "third row" in shown
    assert "fourth row" not in shown


def test_preview_of_no_rows(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in" / "a.parquet")
    assert dry.preview(job(smollm2, tmp_path / "in", tmp_path / "out")) == 0
    assert "no rows" in capsys.readouterr().out


def test_later_prompts_of_a_row_are_shown_and_counted(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", ["w5 w6", "w7 w8 w9"])
    chat = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
    talk: dict[str, Any] = {"prompt__kind": "chat", "prompt__chat_template": chat}
    config = job(tiny, source, tmp_path / "out", prompt__turns=["w20 w21 {{ answers[0] | length }}"], **talk)
    assert dry.preview(config) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- its prompt 2, with made-up answers: ") == 2
    assert "w20 w21" in shown
    assert dry.plan(config) == 0
    planned = capsys.readouterr().out
    assert "(2 of 2 rows sampled, each with 2 prompts, short words for answers)" in planned
    assert f"at most {2 * 2 * 6} to generate" in planned
    prompts = {"a": "w5 {{ text }}", "b": "{{ answers.a | int }} {{ text.nothing.more }}"}
    config = job(tiny, source, tmp_path / "out", prompt__prompts=prompts, prompt__template=None)
    assert dry.preview(config) == 0
    assert capsys.readouterr().out.count("\ntemplate_error: prompt.prompts.b: ") == 2
    assert dry.plan(config) == 0
    assert "(2 of 2 rows sampled)" in capsys.readouterr().out
