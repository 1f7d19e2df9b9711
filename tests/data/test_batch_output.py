from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.data.batch_output import BATCH_OUTPUT, write_batch_output
from batchrun.data.plan import MANIFEST, STATE_FOLDER
from batchrun.errors import BatchrunError

OK: dict[str, Any] = {"completion": "hi é", "finish_reason": "stop", "error_type": None, "error": None}
FAILED: dict[str, Any] = {
    "completion": None,
    "finish_reason": "error",
    "error_type": "invalid_row",
    "error": "line 2: no",
}
COUNTS = {"prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 2}


def write_part(path: Path, rows: list[dict[str, Any]]) -> Path:
    types = [(name, pa.string()) for name in ("custom_id", *OK)] + [(name, pa.int32()) for name in COUNTS]
    pq.write_table(pa.Table.from_pylist([{**COUNTS, **row} for row in rows], pa.schema(types)), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).parent.mkdir()
    (tmp_path / MANIFEST).touch()
    os.utime(tmp_path / MANIFEST, (1_700_000_000, 1_700_000_000))
    return tmp_path


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / BATCH_OUTPUT).read_text("utf-8").splitlines()]


def test_a_line_for_each_row_in_order(folder: Path) -> None:
    write_part(folder / "0.parquet", [{"custom_id": "b", **OK}, {"custom_id": "a", **FAILED}])
    write_part(folder / "1.parquet", [{"custom_id": None, **FAILED}, {"custom_id": "c", **OK}])
    assert write_batch_output(folder, ["0.parquet", "1.parquet"], "tiny")
    lines = lines_of(folder)
    assert [line["custom_id"] for line in lines] == ["b", "a", None, "c"]
    assert lines[1]["response"] is None
    assert lines[1]["error"] == {"code": "invalid_row", "message": "line 2: no"}
    first = lines[0]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "tiny", 1_700_000_000)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi é", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert (body["usage"]["total_tokens"], body["usage"]["prompt_tokens_details"]["cached_tokens"]) == (9, 4)
    assert len({line["id"] for line in lines}) == 4
    before = (folder / BATCH_OUTPUT).read_bytes()
    assert write_batch_output(folder, ["0.parquet", "1.parquet"], "tiny")
    assert (folder / BATCH_OUTPUT).read_bytes() == before


def test_columns_under_other_names(folder: Path) -> None:
    table = pq.read_table(write_part(folder / "0.parquet", [{"custom_id": "a", **OK}]))
    names = {name: f"llm_{name}" for name in (*OK, *COUNTS)}
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), folder / "1.parquet")
    write_batch_output(folder, ["1.parquet"], "tiny", names)
    assert lines_of(folder)[0]["response"]["body"]["choices"][0]["message"]["content"] == "hi é"


def test_thinking_stands_beside_the_answer(folder: Path) -> None:
    table = pq.read_table(write_part(folder / "0.parquet", [{"custom_id": name, **OK} for name in "ab"]))
    table = table.append_column("reasoning", [["hm", None]]).append_column("reasoning_tokens", [[1, 0]])
    pq.write_table(table, folder / "0.parquet")
    write_batch_output(folder, ["0.parquet"], "tiny", {name: name for name in table.column_names})
    a, b = (line["response"]["body"] for line in lines_of(folder))
    assert a["choices"][0]["message"]["reasoning_content"] == "hm"
    assert a["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert "reasoning_content" not in b["choices"][0]["message"]


def test_samples_of_a_request_are_its_choices(folder: Path) -> None:
    rows = [("a", OK), ("a", FAILED), ("b", FAILED), ("b", FAILED), ("c", OK), ("c", OK)]
    write_part(folder / "0.parquet", [{"custom_id": name, **values} for name, values in rows])
    assert write_batch_output(folder, ["0.parquet"], "tiny", samples=2)
    a, b, c = lines_of(folder)
    assert [line["custom_id"] for line in (a, b, c)] == ["a", "b", "c"]
    assert [choice["index"] for choice in a["response"]["body"]["choices"]] == [0]
    assert (b["response"], b["error"]["code"]) == (None, "invalid_row")
    assert [choice["index"] for choice in c["response"]["body"]["choices"]] == [0, 1]
    assert c["response"]["body"]["usage"]["completion_tokens"] == 4
    assert c["response"]["body"]["usage"]["prompt_tokens"] == 7


def test_the_file_appears_whole_or_not_at_all(folder: Path) -> None:
    write_part(folder / "0.parquet", [{"custom_id": "a", **OK}])
    assert not write_batch_output(folder, ["0.parquet", "1.parquet"], "tiny")
    (folder / "1.parquet").write_bytes(b"torn")
    with pytest.raises(BatchrunError, match="cannot make"):
        write_batch_output(folder, ["0.parquet", "1.parquet"], "tiny")
    assert [path.name for path in (folder / STATE_FOLDER).iterdir()] == ["manifest.json"]
