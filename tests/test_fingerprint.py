"""Which settings make another job: each leaf of the schema, one at a time, against an output that is there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.config import Config, leaves, lookup
from batchrun.errors import FingerprintMismatch
from batchrun.job import open_job
from batchrun.output import open_output
from tests.engine.adapters import make_adapter
from tests.engine.families import make_model
from tests.engine.gguf_files import write_gguf

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@dataclasses.dataclass(frozen=True)
class Changed:
    """Settings that make another job, and what the list of differences names; by default the setting itself."""

    settings: dict[str, Any]
    named: str = ""


def one(key: str, value: Any, named: str = "") -> Changed:
    return Changed({key: value}, named)


# By leaf. What a text file holds counts, not where it lies, so some are named otherwise.
TOOLS: dict[str, Any] = {"prompt.chat_template": CHAT + "{{ tools }}", "prompt.tools": [{"name": "look"}]}
MARKERS: dict[str, Any] = {"reasoning.start": "w50", "reasoning.end": "w60"}
IDENTITY: dict[str, Changed] = {
    "task": Changed({"task": "choose", "choose.labels": ["w4", "w5"]}),
    "choose.labels": one("choose.labels", ["w4", "w5"]),
    "choose.delimiter": one("choose.delimiter", " "),
    "choose.normalize": one("choose.normalize", "tokens"),
    "score.continuation": one("score.continuation", "{{ text }}"),
    "score.stride": one("score.stride", 64),
    "model.path": one("model.path", "OTHER_MODEL"),
    "model.gguf_file": one("model.gguf_file", "tiny.gguf"),
    "model.revision": one("model.revision", "v2"),
    "model.tokenizer": one("model.tokenizer", "OTHER_TOKENIZER"),
    "model.dtype": one("model.dtype", "bfloat16"),
    "model.quantization": one("model.quantization", "int8"),
    "engine.kv_cache_dtype": one("engine.kv_cache_dtype", "int8"),
    "engine.batch_invariant": one("engine.batch_invariant", True),
    "model.adapter": one("model.adapter", "ADAPTER"),
    "model.adapters": one("model.adapters", {"a": "ADAPTER"}),
    "model.max_model_len": one("model.max_model_len", 100),
    "model.trust_remote_code": one("model.trust_remote_code", True),
    "sampling.n": Changed({"sampling.n": 2, "sampling.temperature": 0.5}),
    "sampling.max_tokens": one("sampling.max_tokens", 7),
    "sampling.adapter": Changed({"model.adapters": {"a": "ADAPTER"}, "sampling.adapter": "a"}),
    "sampling.temperature": one("sampling.temperature", 0.5),
    "sampling.top_p": one("sampling.top_p", 0.9),
    "sampling.top_k": one("sampling.top_k", 5),
    "sampling.min_tokens": one("sampling.min_tokens", 2),
    "sampling.min_p": one("sampling.min_p", 0.1),
    "sampling.presence_penalty": one("sampling.presence_penalty", 0.5),
    "sampling.frequency_penalty": one("sampling.frequency_penalty", 0.5),
    "sampling.repetition_penalty": one("sampling.repetition_penalty", 1.1),
    "sampling.logit_bias": one("sampling.logit_bias", {9: 5.0, "w5": 1.0}),
    "sampling.allowed_token_ids": one("sampling.allowed_token_ids", [4, 5]),
    "sampling.bad_words": one("sampling.bad_words", "w9"),
    "sampling.include_stop_str_in_output": one("sampling.include_stop_str_in_output", True),
    "sampling.logprobs": one("sampling.logprobs", 1),
    "sampling.prompt_logprobs": one("sampling.prompt_logprobs", 1),
    "sampling.seed": one("sampling.seed", 1),
    "sampling.seed_by": one("sampling.seed_by", "content"),
    "sampling.stop": one("sampling.stop", ["w9"]),
    "sampling.stop_token_ids": one("sampling.stop_token_ids", [9]),
    "sampling.ignore_eos": one("sampling.ignore_eos", True),
    "sampling.skip_special_tokens": one("sampling.skip_special_tokens", False),
    "sampling.repetition_max_pattern": one("sampling.repetition_max_pattern", 32),
    "sampling.repetition_min_pattern": one("sampling.repetition_min_pattern", 2),
    "sampling.repetition_min_count": one("sampling.repetition_min_count", 3),
    "structure.json": one("structure.json", {"type": "object"}),
    "structure.regex": one("structure.regex", "w[0-9]"),
    "structure.choice": one("structure.choice", ["w5", "w6"]),
    "structure.grammar": one("structure.grammar", 'start: "w5"'),
    "structure.json_object": one("structure.json_object", True),
    "structure.any_whitespace": one("structure.any_whitespace", True),
    "structure.fast_forward": one("structure.fast_forward", False),
    "reasoning.start": Changed(MARKERS),
    "reasoning.end": Changed(MARKERS),
    "reasoning.max_tokens": Changed(MARKERS | {"reasoning.max_tokens": 5}),
    "reasoning.stop_in_thinking": Changed(MARKERS | {"reasoning.stop_in_thinking": True}),
    "embed.pooling": one("embed.pooling", "cls"),
    "embed.normalize": one("embed.normalize", False),
    "embed.dimensions": one("embed.dimensions", 8),
    "embed.prompt": one("embed.prompt", "query"),
    "rank.query": one("rank.query", "w5"),
    "rank.text": one("rank.text", "w5"),
    "rank.activation": one("rank.activation", "none"),
    "prompt.variables": one("prompt.variables", {"language": "French"}),
    "prompt.kind": Changed({"prompt.kind": "completion", "prompt.chat_template": None}),
    "prompt.template": one("prompt.template", "w5 {{ text }}"),
    "prompt.template_file": Changed(
        {"prompt.template": None, "prompt.template_file": "TEMPLATE"}, "prompt.template_file (text)"
    ),
    "prompt.messages": Changed({"prompt.template": None, "prompt.messages": "messages"}),
    "prompt.prompt_ids": Changed(
        {"prompt.template": None, "prompt.prompt_ids": "ids", "prompt.chat_template": None}, "prompt.prompt_ids"
    ),
    "prompt.prompts": Changed({"prompt.template": None, "prompt.prompts": {"a": "{{ text }}"}}),
    "prompt.turns": one("prompt.turns", ["w5"]),
    "prompt.params": one("prompt.params", "params"),
    "prompt.system": one("prompt.system", "w6"),
    "prompt.examples": one("prompt.examples", [{"user": "w7", "assistant": "w8"}]),
    "prompt.prefill": one("prompt.prefill", "w9"),
    "prompt.chat_template": one("prompt.chat_template", CHAT + "w4", "prompt.chat_template (text)"),
    "prompt.chat_template_kwargs": one("prompt.chat_template_kwargs", {"thinking": False}),
    "prompt.tools": Changed(TOOLS, "prompt.tools (text)"),
    "prompt.tools_column": Changed({"prompt.chat_template": CHAT + "{{ tools }}", "prompt.tools_column": "text"}),
    "prompt.overlong": one("prompt.overlong", "skip"),
    "prompt.reserve_tokens": one("prompt.reserve_tokens", 9),
    "prompt.on_empty": one("prompt.on_empty", "skip"),
    "input.filter": one("input.filter", "id > 3"),
    "input.sample": one("input.sample", 0.5),
    "input.sample_seed": one("input.sample_seed", 1),
    "input.limit": one("input.limit", 5),
    "input.schema": one("input.schema", "union"),
    "input.types": one("input.types", {"id": "string"}),
    "input.delimiter": one("input.delimiter", ","),
    "input.quote": one("input.quote", "'"),
    "output.chunk_rows": one("output.chunk_rows", 3),
    "output.completion": one("output.completion", "label"),
    "output.prefix": one("output.prefix", "llm_"),
    "output.columns": one("output.columns", ["text"]),
    "output.tool_calls": one("output.tool_calls", "hermes"),
    "output.retry_invalid": Changed(
        {"output.retry_invalid": 2, "output.parse": "json", "sampling.temperature": 0.5}, "output.retry_invalid"
    ),
}

OTHERS: dict[str, Any] = {
    "input.format": "parquet",
    "input.path": "MOVED_INPUT",
    "input.columns": ["id", "text", "messages", "ids", "params"],
    "model.device": "cpu",
    "engine.attention": "torch",
    "engine.workers": "2",
    "engine.overlap": "on",
    "engine.cuda_graphs": "off",
    "output.compression": "snappy",
    "launch.index": 1,
    "launch.count": 3,
    "retry": ["error"],
    "job.name": "other",
    "job.description": "other",
}
# They say where a data set comes from, and the data set itself is what counts; or they are no part of a run.
APART = {
    "output.path",
    "mode",
    "input.name",
    "input.split",
    "input.revision",
    "input.streaming",
    "input.storage_options",
    "output.parse",  # these have a fingerprint of their own
    "output.schema",
    "output.parsed",
    "output.derived",
    "output.duplicates",
}
CSV = {"input.path": "ROWS", "input.format": "csv"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, input and templates, and an output that belongs to the plain job."""
    folder = tmp_path_factory.mktemp("drift")
    make_model("llama", folder / "model")
    write_gguf(folder / "model" / "tiny.gguf", folder / "model")
    make_model("qwen2", folder / "OTHER_MODEL")
    make_adapter(folder / "ADAPTER", folder / "model", 1)
    shutil.copytree(folder / "model", folder / "OTHER_TOKENIZER")
    changed = json.loads((folder / "OTHER_TOKENIZER" / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["w4"], vocabulary["w5"] = vocabulary["w5"], vocabulary["w4"]
    (folder / "OTHER_TOKENIZER" / "tokenizer.json").write_text(json.dumps(changed))
    (folder / "TEMPLATE").write_text("w5 {{ text }}")
    messages = [[{"role": "user", "content": "w4"}]] * 8
    table = pa.table({"id": range(8), "text": ["w4"] * 8, "messages": messages, "ids": [[4]] * 8, "params": ["{}"] * 8})
    for name in ("input", "MOVED_INPUT"):
        (folder / name).mkdir()
        pq.write_table(table, folder / name / "rows.parquet")
    (folder / "ROWS").write_text("id,text\n1,w4\n2,w5\n")
    for base, output in (({}, "output"), (CSV, "output-csv")):
        with open_output(open_job(config(folder, base, output), weights=True)):
            pass
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of GGUF files does not go into the user's own."""
    monkeypatch.setenv("BATCHRUN_CACHE", str(tmp_path / "cache"))


def config(folder: Path, changes: dict[str, Any] | None = None, output: str = "output") -> Config:
    """The plain job with changed settings; words in capitals are files of the folder."""
    values: dict[str, Any] = {
        "model.path": str(folder / "model"),
        "model.dtype": "float32",
        "prompt.template": "{{ text }}",
        "prompt.chat_template": CHAT,
        "input.path": str(folder / "input"),
        "output.path": str(folder / output),
        "output.chunk_rows": 4,
        "engine.kv_cache_gib": 0.01,
    }
    for key, value in (changes or {}).items():
        values[key] = str(folder / value) if isinstance(value, str) and value.isupper() else value
        if key == "model.adapters":
            values[key] = {name: str(folder / path) for name, path in value.items()}
    made = Config()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(lookup(made, section) if section else made, name, value)
    for section in ("input", "output", "sampling", "reasoning", "prompt", "model"):
        lookup(made, section).__post_init__()
    return made


def files(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        yield str(path), path.stat().st_mtime_ns


def test_every_setting_is_in_one_table() -> None:
    inside = {key for key, field in leaves().items() if field.metadata["identity"]}
    assert set(IDENTITY) == inside
    rest = set(leaves()) - inside - APART
    assert set(OTHERS) <= rest
    for key in rest - set(OTHERS):
        other_value(key)  # raises for a type that it does not know


def other_value(key: str) -> Any:
    """Another value of a setting that takes a number or is on or off."""
    default = lookup(Config(), key)
    if key.startswith("bench.") or default is None:
        return default if key.startswith("bench.") else 3
    assert isinstance(default, (bool, int, float)), f"{key}: add another value to OTHERS"
    return not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else default / 2


@pytest.mark.parametrize("key", sorted(IDENTITY))
def test_another_value_is_another_job(folder: Path, key: str) -> None:
    base, output = (CSV, "output-csv") if key in ("input.types", "input.delimiter", "input.quote") else ({}, "output")
    before = list(files(folder / output))
    changed = IDENTITY[key]
    with (
        pytest.raises(FingerprintMismatch) as caught,
        open_output(open_job(config(folder, {**base, **changed.settings}, output), weights=True)),
    ):
        pass
    assert caught.value.exit_code == 4
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert any(line.startswith(f"{changed.named or key}: ") and " -> " in line for line in lines), lines
    assert list(files(folder / output)) == before


REST = sorted(key for key, field in leaves().items() if not field.metadata["identity"] and key not in APART)


@pytest.mark.parametrize("key", REST)
def test_another_value_is_the_same_job(folder: Path, key: str) -> None:
    value = OTHERS[key] if key in OTHERS else other_value(key)
    changes = {key: value, **({"launch.count": 3} if key == "launch.index" else {})}
    with open_output(open_job(config(folder, changes), weights=True)) as output:
        manifest = json.loads((folder / "output" / "__batchrun" / "manifest.json").read_text())
        assert output.store.fingerprint == manifest["fingerprint"]


@pytest.mark.parametrize("what", ["values", "rows", "another file", "name"])
def test_input_that_changed_in_its_place_is_named(folder: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(folder / "input", tmp_path / "in")
    changes = {"input.path": str(tmp_path / "in"), "output.path": str(tmp_path / "out")}
    with open_output(open_job(config(folder, changes), weights=True)):
        pass
    path = tmp_path / "in" / "rows.parquet"
    table = pq.read_table(path)
    if what == "values":
        other = table.set_column(1, "text", pa.array(["w5"] * 8))
        pq.write_table(other, path)
        assert path.stat().st_size == (folder / "input" / "rows.parquet").stat().st_size
    elif what == "rows":
        pq.write_table(table.slice(1), path)
    elif what == "another file":
        pq.write_table(table, tmp_path / "in" / "more.parquet")
    else:
        path.rename(tmp_path / "in" / "other.parquet")
    with (
        pytest.raises(FingerprintMismatch, match=r"input file (rows|more|other)\.parquet: "),
        open_output(open_job(config(folder, changes), weights=True)),
    ):
        pass


def test_the_manifest_is_written_once_and_tells_how_the_output_was_made(folder: Path) -> None:
    path = folder / "output" / "__batchrun" / "manifest.json"
    content = path.read_bytes()
    with open_output(open_job(config(folder, {"engine.max_num_seqs": 3}), weights=True)):
        pass
    assert path.read_bytes() == content
    manifest = json.loads(content)
    assert manifest["plan"] == {"rows": 8, "chunks": 2, "chunk_rows": 4}
    assert manifest["config"]["engine"]["max_num_seqs"] == 256
    assert {"batchrun", "torch", "transformers", "triton", "pyarrow", "python"} <= set(manifest["versions"])
    assert manifest["device"] == "cpu"
    assert len(manifest["settings"]["model.files"]) == 64
    assert [file["name"] for file in manifest["files"]] == ["rows.parquet"]


def test_what_may_be_secret_is_not_written_down(folder: Path, tmp_path: Path) -> None:
    changes = {"input.storage_options": {"secret": "hush", "key": "mine"}, "output.path": str(tmp_path / "out")}
    with open_output(open_job(config(folder, changes), weights=True)):
        pass
    written = (tmp_path / "out" / "__batchrun" / "manifest.json").read_text()
    assert "hush" not in written
    assert json.loads(written)["config"]["input"]["storage_options"] == ["key", "secret"]
