"""What `batchrun --help` and `batchrun --keys` print, and docs/configuration.md: all from the schema and the files."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from batchrun.compose import Choices
from batchrun.config import MODES, Config, leaves
from batchrun.overrides import GROUPS, LEAVES

MODE_HELP = {
    "run": "complete every row (the default)",
    "plan": "files, rows, chunks, token counts of a sample, memory, an estimate; loads no weights",
    "preview": "the first rows as the model will see them, token by token; loads no weights",
    "bench": "measure batchrun beside other engines; see job=bench and job=article",
    "status": "how far the job of output.path is, from the folder alone; needs neither model nor input",
    "reparse": "parse the completions in output.path anew, by output.parse; needs neither model nor input",
    "merge": "the parts of a finished output.path as fewer, larger files in output.merge_path",
}

COMMON_KEYS = (
    "input.path",
    "input.columns",
    "input.limit",
    "output.path",
    "output.completion",
    "model.path",
    "prompt.template",
    "prompt.template_file",
    "prompt.system",
    "sampling.max_tokens",
    "sampling.temperature",
    "sampling.stop",
    "engine.kv_cache_gib",
)

USAGE = "usage: batchrun [--config-dir DIR] [--cfg] [--keys] [--version] [--help] job=NAME KEY=VALUE ..."


def help_text(found: Choices) -> str:
    """The help: usage, modes, jobs, groups and the keys that most jobs set."""
    options = {
        "--config-dir DIR": "a folder of your own: DIR/job/NAME.yaml, and options of the groups below",
        "--cfg": "print the composed settings and stop",
        "--keys": "list every setting with its type, default and meaning, and stop",
        "--version": "print the version and stop",
    }
    sections = [
        USAGE,
        "Runs a language model over a Parquet dataset and writes one output row for each input row.",
        _table("options", options),
        _table("mode=", {mode: MODE_HELP[mode] for mode in MODES}),
        _table("job=", found.jobs),
        *(_table(f"{group}=", found.groups[group]) for group in GROUPS),
        _table("keys set most often", {key: leaves()[key].metadata["help"] for key in COMMON_KEYS}),
        "Values are taken as typed, globs and templates too. A list is [a, b].\n"
        "\\n, \\t and \\\\ in prompts and stop strings stand for a newline, a tab and a backslash.\n"
        "model=FOLDER or model=ORG/NAME is short for model.path=...",
    ]
    return "\n\n".join(sections)


def keys_text() -> str:
    """Every setting on two lines: name, type and default; then what it means."""
    lines = [
        f"{key}: {_type_name(key)} = {_default(field)}\n    {field.metadata['help']}" for key, field in leaves().items()
    ]
    return "\n".join(lines)


def keys_markdown() -> str:
    """Tables of every setting, one for each section of the schema."""
    sections: dict[str, list[str]] = {}
    for key, field in leaves().items():
        changes = "yes" if field.metadata["identity"] else ""
        row = f"| `{key}` | {_type_name(key)} | `{_default(field)}` | {changes} | {field.metadata['help']} |"
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    docs = {f.name: f.default_factory.__doc__ for f in dataclasses.fields(Config) if f.name in sections}
    head = ["| key | type | default | changes completions | meaning |", "|---|---|---|---|---|"]
    parts = [
        "# Configuration\n\n"
        "Every setting, by its key on the command line and its place in YAML. Settings that change completions are\n"
        "part of the job's fingerprint: with another value, the same output folder is refused. The others may change\n"
        "between two runs of one job. `batchrun --keys` prints this list."
    ]
    for name, rows in sections.items():
        intro = [f"## {name}", "", docs[name], ""] if name else ["## The job as a whole", ""]
        parts.append("\n".join([*intro, *head, *rows]))
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items())])


def _type_name(key: str) -> str:
    hint = LEAVES[key]
    if hint is Any:
        return "string or list"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, str(hint).replace("typing.", ""))


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


if __name__ == "__main__":
    sys.stdout.write(keys_markdown())
