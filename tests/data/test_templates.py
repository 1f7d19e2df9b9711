from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pytest

from batchrun.data.templates import Template, read_text
from batchrun.errors import InputError


def template(text: str, *names: str) -> Template:
    return Template("prompt.template", text, names)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("[{{ x }}]", None, "[]"),
        ("{{ x }}", 9223372036854775807, "9223372036854775807"),
        ("{{ x }}", datetime.datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05"),
        ("{{ x.year }} {{ x.strftime('%d') }}", datetime.datetime(2024, 1, 2), "2024 02"),
        ("{{ x }}", datetime.date(2024, 1, 2), "2024-01-02"),
        ("{{ x }}", decimal.Decimal("1.50"), "1.50"),
        ("{% for i in x %}{{ i.name }};{% endfor %}", [{"name": "a"}, {"name": None}], "a;;"),
        ("{{ x | tojson }}", {"é": "<日>", "n": None}, '{"é": "<日>", "n": null}'),
        (
            "{{ x | tojson }}",
            [datetime.date(2024, 1, 2), decimal.Decimal("1.5"), b"\xc3\xa9"],
            '["2024-01-02", "1.5", "é"]',
        ),
        ("{{ x }}", "<b> & 'q'", "<b> & 'q'"),
        ("{{ x }}\n", "line", "line"),
    ],
)
def test_rendering(text: str, value: Any, expected: str) -> None:
    assert template(text, "x").render({"x": value}) == expected


def test_needed_columns_in_schema_order() -> None:
    made = template("{% for n in range(2) %}{{ b }}{{ n }}{% endfor %}{{ a.c }}", "a", "unused", "b")
    assert made.columns == ["a", "b"]


def test_column_named_like_a_jinja_global_is_the_column() -> None:
    made = template("{{ range }}", "range")
    assert made.render({"range": "5 km"}) == "5 km"


def test_row_reaches_names_that_are_no_identifiers() -> None:
    made = template('{{ row["review text"] }} {{ row.stars }}', "id", "review text", "stars")
    assert made.columns == ["review text", "stars"]
    assert made.render({"review text": "fine", "stars": 4}) == "fine 4"


def test_row_as_a_whole_needs_every_column() -> None:
    made = template("{% for name, value in row.items() %}{{ name }}={{ value }};{% endfor %}", "a", "b")
    assert made.columns == ["a", "b"]
    assert made.render({"a": 1, "b": None}) == "a=1;b=;"
    assert template("{{ row[a] }}", "a", "b").columns == ["a", "b"]


def test_column_named_row_is_the_column() -> None:
    made = template("{{ row }}", "row", "other")
    assert made.columns == ["row"]
    assert made.render({"row": 7}) == "7"


@pytest.mark.parametrize("text", ["{{ text }} {{ tittle }}", "{{ row.tittle }}", "{{ row['tittle'] }}"])
def test_unknown_variable_lists_the_columns(text: str) -> None:
    with pytest.raises(InputError, match=r"prompt\.template uses tittle, .*: text, title"):
        template(text, "text", "title")


@pytest.mark.parametrize("text", ["one\ntwo {{ text", "one\n{{ text | no_such_filter }}", "one\n{% if text %}"])
def test_syntax_error_has_its_line(text: str) -> None:
    with pytest.raises(InputError, match=r"prompt\.template, line 2: "):
        template(text, "text")


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 2000 + "text" + ")" * 2000 + " }}",
        "{% if text %}" * 150 + "x" + "{% endif %}" * 150,
        "{% for a in text %}" * 30 + "x" + "{% endfor %}" * 30,
    ],
    ids=["brackets", "conditions", "loops"],
)
def test_a_template_that_python_cannot_compile_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"prompt\.template is nested too deeply: "):
        template(text, "text")


@pytest.mark.parametrize("text", ["{% include 'x' %}", "{% import 'x' as x %}", "{% extends 'x' %}"])
def test_other_templates_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="includes or imports another template"):
        template(text, "text")


@pytest.mark.parametrize("text", ["{{ x.__class__.__mro__ }}", "{{ x.append(1) }}", "{{ ''.__class__.__base__() }}"])
def test_templates_are_sandboxed(text: str) -> None:
    with pytest.raises(Exception, match=r"unsafe|not safe|undefined"):
        template(text, "x").render({"x": []})


def test_text_is_looked_up_in_folders_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, current = tmp_path / "job", tmp_path / "cwd"
    for folder in (beside, current):
        folder.mkdir()
        (folder / "t.jinja").write_text(f"in {folder.name}")
    monkeypatch.chdir(current)
    assert read_text("prompt.template_file", "t.jinja", [beside]) == "in job"
    assert read_text("prompt.template_file", "t.jinja", []) == "in cwd"
    assert read_text("prompt.template_file", str(current / "t.jinja"), [beside]) == "in cwd"


def test_text_not_found_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        read_text("prompt.template_file", "t.jinja", [tmp_path / "job"])
    assert f"{tmp_path}/job/t.jinja, {tmp_path}/t.jinja" in str(caught.value)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="as UTF-8 text"):
        read_text("prompt.template_file", "t.jinja", [tmp_path])
