from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.bench.workloads import (
    MAKERS,
    Row,
    Workload,
    encode,
    fixed_texts,
    fixed_workload,
    own_workload,
    warmup_rows,
)
from batchrun.config import Config, InputConfig, ModelConfig, PromptConfig, SamplingConfig
from batchrun.errors import ConfigError, InputError
from tests.data.tiny import CHAT, make_tokenizer

# Measurements of different days are comparable only while these stay the same.
DIGESTS = {
    "annotate": "8481a5da82924788",
    "generate": "6978f26474b34742",
    "summarise": "4afb6cf72357466f",
    "single": "a2bbb0e88f77293c",
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_fixed_workloads_never_change(name: str):
    assert hashlib.sha256(repr(fixed_texts()[name]).encode()).hexdigest()[:16] == DIGESTS[name]


def test_the_fixed_workloads_have_their_shapes():
    texts = fixed_texts()
    assert {name: len(rows) for name, rows in texts.items()} == {
        "annotate": 256, "generate": 96, "summarise": 16, "single": 1,
    }  # fmt: skip
    heads = {text.partition("\nAnswer:")[0].rpartition("\n\n")[0][:2000] for text, _ in texts["annotate"]}
    assert len(heads) == 1
    assert len({text for text, _ in texts["generate"]}) == 96
    assert {count for _, count in texts["generate"]} == {32, 64, 96, 128, 192, 256, 384}
    assert all(1200 <= len(text.split()) - 3 <= 2200 for text, _ in texts["summarise"])


def test_token_ids_of_a_real_tokenizer(smollm2: Path):
    from transformers import AutoTokenizer

    workload = fixed_workload("single", AutoTokenizer.from_pretrained(smollm2))
    assert (len(workload.rows), workload.prompt_tokens, workload.output_tokens) == (1, 39, 128)
    assert workload.longest == 167


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = make_tokenizer(bos=True, chat_template=CHAT)
    assert tokenizer.decode(encode(tokenizer, "ab")) == "<|user|>ab<|end|><|assistant|>"
    plain = make_tokenizer(bos=True, chat_template=None)
    assert plain.decode(encode(plain, "ab")) == "<s>ab"


def test_the_first_rows_of_a_workload():
    tokenizer = make_tokenizer(bos=False)
    some, all_rows = fixed_workload("generate", tokenizer, 5), fixed_workload("generate", tokenizer)
    assert some.rows == all_rows.rows[:5]
    with pytest.raises(ConfigError, match="'translate': there are annotate"):
        fixed_workload("translate", tokenizer)


def test_warm_up_shares_nothing_with_the_workloads_and_a_prefix_within_itself():
    workload = Workload("w", [Row([token, 9], 1) for token in range(40)])
    rows = warmup_rows([workload], 50)
    heads = [row.prompt_ids[0] for row in rows]
    assert (len(rows), len(set(heads))) == (8, 4)
    assert {tuple(row.prompt_ids[:64]) for row in rows[4:]} == {tuple(rows[0].prompt_ids[:64])}
    assert len({tuple(row.prompt_ids) for row in rows}) == 8
    assert set(heads) <= set(range(40, 50))
    assert all(0 <= token < 50 for row in rows for token in row.prompt_ids)
    assert rows == warmup_rows([workload], 50)


def own(tmp_path: Path, model: Path, columns: dict[str, Any], **prompt: Any) -> Workload:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    config = Config(
        offline=True,
        model=ModelConfig(path=str(model)),
        input=InputConfig(path=str(path)),
        prompt=PromptConfig(kind="completion", **prompt),
        sampling=SamplingConfig(max_tokens=7),
    )
    return own_workload(config, 2)


def test_own_rows_by_token_ids_text_or_a_prompt(tmp_path: Path, tiny: Path):
    ids = own(tmp_path, tiny, {"text": ["w5"] * 3, "prompt_ids": [[8, 9], [10], [11]]})
    assert ids == Workload("input", [Row([8, 9], 7), Row([10], 7)])
    assert own(tmp_path, tiny, {"text": ["w5 w6", "w7", "w8"]}).rows == [Row([5, 6], 7), Row([7], 7)]
    assert own(tmp_path, tiny, {"a": ["w5", None, "w8"]}, template="w9 {{ a }}").rows[0] == Row([9, 5], 7)
    lengths = {"text": ["w5", "w6"], "own": ['{"max_tokens": 3}', "{}"]}
    assert own(tmp_path, tiny, lengths, params="own").rows == [Row([5], 3), Row([6], 7)]


def test_own_rows_that_cannot_be_prompts(tmp_path: Path, tiny: Path):
    with pytest.raises(InputError, match="neither a column prompt_ids nor a column text, but a"):
        own(tmp_path, tiny, {"a": ["w5"]})
    with pytest.raises(InputError, match=r"no row of .*rows\.parquet makes a prompt"):
        own(tmp_path, tiny, {"text": ["", ""]})
