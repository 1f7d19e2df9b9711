"""What docs/python.md shows runs as it stands there, with a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny import CHAT
from tests.engine.families import make_model

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model("llama", tmp_path / "models" / "small")
    (folder / "chat_template.jinja").write_text(CHAT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert "closed" in str(names["llm"]._driver.ended)
    assert len(names["labelled"]) == 2
