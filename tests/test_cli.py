"""The installed command from outside: what it makes of awkward values, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import batchrun
from batchrun import cli
from batchrun.assets import asset
from batchrun.compose import choices
from batchrun.errors import Drained, ErrorBudgetExceeded, FingerprintMismatch, OutputInUse

COMMAND = Path(sys.executable).with_name("batchrun")
HOME = os.path.expanduser("~")


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a folder of its own."""
    return subprocess.run(
        [COMMAND, *words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


class Typed(NamedTuple):
    """Words on the command line that must compose, a key, and its value then."""

    words: list[str]
    key: str
    value: Any


class Refused(NamedTuple):
    """Words on the command line that must end with exit code 2 and these words on stderr."""

    words: list[str]
    message: str


TRAPS = [
    Typed(["input.path=data/*.parquet"], "input.path", ["data/*.parquet"]),
    Typed(["input.path=data/[0-9]*.parquet"], "input.path", ["data/[0-9]*.parquet"]),
    Typed(["input.path={a,b}.parquet"], "input.path", ["{a,b}.parquet"]),
    Typed(["input.path=s3://b/date=2024-01-01/x.parquet"], "input.path", ["s3://b/date=2024-01-01/x.parquet"]),
    Typed(["input.path=~/rows.parquet"], "input.path", [f"{HOME}/rows.parquet"]),
    Typed(["input.path=a.parquet,b.parquet"], "input.path", ["a.parquet,b.parquet"]),
    Typed(["input.path=[a/x=1/*.parquet,~/b.parquet]"], "input.path", ["a/x=1/*.parquet", f"{HOME}/b.parquet"]),
    Typed(["output.path=out/été #1 (a: b) @home/$x\\y"], "output.path", "out/été #1 (a: b) @home/$x\\y"),
    Typed(
        ["prompt.template=Résumé: {{ text }} #1, 'a' \"b\" = c"],
        "prompt.template",
        "Résumé: {{ text }} #1, 'a' \"b\" = c",
    ),
    Typed(["prompt.template=[INST] {{ text }} [/INST]"], "prompt.template", "[INST] {{ text }} [/INST]"),
    Typed(["prompt.template=first\\nsecond \\\\n"], "prompt.template", "first\nsecond \\n"),
    Typed(["prompt.template=costs ${price} of ${text"], "prompt.template", "costs ${price} of ${text"),
    Typed(["prompt.system=日本語で答える"], "prompt.system", "日本語で答える"),
    Typed(["sampling.stop=END"], "sampling.stop", ["END"]),
    Typed(["sampling.stop=\\n\\n"], "sampling.stop", ["\n\n"]),
    Typed(['sampling.stop=["\\n", "a, b", ${x}]'], "sampling.stop", ["\n", "a, b", "${x}"]),
    Typed(["sampling.stop=null"], "sampling.stop", []),
    Typed(["input.limit=1e6"], "input.limit", 1000000),
    Typed(["input.limit=1_000_000"], "input.limit", 1000000),
    Typed(["prompt.prompts.a=first\\n{{ text }} for ${x}"], "prompt.prompts.a", "first\n{{ text }} for ${x}"),
    Typed(['prompt.turns=["Again,\\nplease", {{ text }}]'], "prompt.turns", ["Again,\nplease", "{{ text }}"]),
    Typed(["prompt.variables.style=Poe, it's a=b (c) #1"], "prompt.variables.style", "Poe, it's a=b (c) #1"),
    Typed(["prompt.variables.count=5"], "prompt.variables.count", 5),
    Typed(["score.continuation=\\n{{ a }}"], "score.continuation", "\n{{ a }}"),
    Typed(["choose.delimiter=\\n"], "choose.delimiter", "\n"),
    Typed(["output.derived.x=${a}\\n"], "output.derived.x", "${a}\n"),
    Typed(["structure.regex=\\d{2}${1}\\n"], "structure.regex", "\\d{2}${1}\\n"),
    Typed(["model.adapter=~/a"], "model.adapter", os.path.expanduser("~/a")),
    Typed(["model.adapters.a=~/a"], "model.adapters.a", os.path.expanduser("~/a")),
    Typed(["prompt.tools=~/a.json"], "prompt.tools", os.path.expanduser("~/a.json")),
    Typed(["sampling.ignore_eos=Yes"], "sampling.ignore_eos", True),
    Typed(["sampling.stop_token_ids=1, 2"], "sampling.stop_token_ids", [1, 2]),
    Typed(["model=Qwen/Qwen2.5-0.5B-Instruct"], "model.path", "Qwen/Qwen2.5-0.5B-Instruct"),
    Typed(["sampling=creative"], "sampling.temperature", 0.8),
    Typed(["job=annotate", "prompt.template={{ review }}"], "prompt.template_file", None),
    Refused(
        ["job=anotate"],
        f"job=anotate is not one of {', '.join(choices().jobs)}; did you mean job=annotate?",
    ),
    Refused(["typo=1"], "there is no setting 'typo'"),
    Refused(["+typo=1"], "there is no setting 'typo'"),
    Refused(["sampling.max_token=1"], "did you mean sampling.max_tokens?"),
    Refused(["+sampling.max_token=1"], "did you mean sampling.max_tokens?"),
    Refused(["max_rows=5"], "did you mean input.limit?"),
    Refused(["input.limit=many"], "input.limit=many is not a whole number"),
    Refused(["input.limit=" + "9" * 5000], "is not a whole number"),
    Refused(["sampling.max_tokens=null"], "sampling.max_tokens=null: this setting always has a value"),
    Refused(["sampling.stop_token_ids=null"], "[] empties it"),
    Refused(["sampling.stop_token_ids=[[1]]"], "sampling.stop_token_ids=[1] is not a whole number"),
    Refused(["sampling.ignore_eos=true,false"], "sampling.ignore_eos=true,false is neither true nor false"),
    Refused(["sampling.logit_bias=5"], "sampling.logit_bias=5 is not a mapping: write sampling.logit_bias.NAME=VALUE"),
    Refused(["sampling.logit_bias={'a: 1}"], "sampling.logit_bias={'a: 1} cannot be read: a list is written [a, b]"),
    Refused(["prompt.examples=5"], "prompt.examples=5 is not a list"),
    Refused(["sampling.top_k=1e23"], "it must be at least 0 and at most 2147483647"),
    Refused(["sampling.repetition_min_count=3e9"], "it must be at least 2 and at most 2147483647"),
    Refused(["sampling.min_tokens=500"], "it must be between 0 and sampling.max_tokens=128"),
    Refused(["output.chunk_rows=1e30"], "it must be between 1 and 9.22337e+18"),
    Refused(["output.journal_seconds=inf"], "it must be between 0.01 and 1e+09"),
    Refused(["run.drain_seconds=1e300"], "it must be between 0 and 1e+09"),
    Refused(["launch.index=5"], "launch.count=1 workers are numbered from 0 to 0"),
    Refused(["engine.kv_cache_gib=nan"], "engine.kv_cache_gib=nan must be above 0"),
    Refused(["sampling.top_p=2"], "sampling.top_p=2.0 is out of range"),
    Refused(["input=rows.parquet"], "input.path=rows.parquet"),
    Refused(["launch=slurm_array"], "SLURM_ARRAY_TASK_ID"),
    Refused(["--confg-dir", "x"], "unrecognized arguments: --confg-dir"),
    Refused(["--config-dir", "nowhere", "job=demo"], "nowhere is not a folder"),
    Refused(["prompt.template_file=nowhere.j2"], "prompt.template_file=nowhere.j2 is not a file; looked at"),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: " ".join(trap.words))
def test_awkward_words(trap: Typed | Refused, tmp_path: Path):
    done = command("--cfg", *trap.words, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    if isinstance(trap, Refused):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("batchrun: ")
        assert trap.message in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        value = yaml.safe_load(done.stdout)
        for name in trap.key.split("."):
            value = value[name]
        assert value == trap.value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to do"),
        (["job=annotate"], "input.path is not set"),
        (["job=annotate", "input.path=x"], "output.path is not set"),
        (["job=annotate", "input.path=x", "output.path=y"], "model.path is not set"),
        (["model=m", "input.path=x", "output.path=y"], "there is no prompt"),
        (["job=demo", "output.path=out"], "-m batchrun.demo"),
    ],
)
def test_an_incomplete_job_ends_before_anything_loads(words: list[str], message: str, tmp_path: Path):
    done = command(*words, cwd=tmp_path, BATCHRUN_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_jobs_groups_and_keys_without_loading_torch():
    program = (
        "import sys; from batchrun.cli import main; code = main(['--help']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for expected in ("annotate", "summarise", "slurm_array", "creative", "input.path", "preview", "--config-dir"):
        assert expected in done.stdout


def test_version_and_module_run(tmp_path: Path):
    assert command("--version", cwd=tmp_path).stdout == f"batchrun {batchrun.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "batchrun", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"batchrun {batchrun.__version__}\n"


def test_keys_into_a_closed_pipe_ends_quietly():
    done = subprocess.run(f"'{COMMAND}' --keys | head -1", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "mode: string = run\n"
    assert done.stderr == ""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder with rows in a Hive path full of characters that have a meaning somewhere."""
    path = tmp_path / "day=1,a" / "é [0] {b}#c.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"review": ["so good", "so bad"]}), path)
    return path


def test_preview_shows_special_tokens_of_rows_in_an_awkward_path(rows: Path, smollm2: Path, tmp_path: Path):
    words = ["mode=preview", "job=generate", f"model={smollm2}", "prompt.template=No. #1: {{ review }}\\n${x}"]
    done = command(*words, "input.path=day=1,*/é [[]0] {b}#c.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>user\nNo. #1: so good\n${x}<|im_end|>" in done.stdout
    assert list(tmp_path.iterdir()) == [rows.parent]


def test_a_template_that_needs_a_missing_column_is_refused(rows: Path, smollm2: Path, tmp_path: Path):
    done = command("job=annotate", f"model={smollm2}", f"input.path={rows.parent}", "output.path=out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "uses text" in done.stderr
    assert "review" in done.stderr
    assert list(tmp_path.iterdir()) == [rows.parent]


def test_the_demo_job_runs_and_another_job_may_not_have_its_folder(smollm2: Path, reviews: Path, tmp_path: Path):
    words = ["job=demo", "input.limit=2", "output.path=out", "engine=small", "engine.num_threads=1"]
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "label" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    [part] = (tmp_path / "out").glob("*.parquet")
    table = pq.read_table(part)
    assert table["status"].to_pylist() == ["ok", "ok"]
    assert table["text"].to_pylist() == pq.read_table(reviews)["text"][:2].to_pylist()
    refused = command(*words, "sampling.max_tokens=3", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "sampling.max_tokens: 8 -> 3" in refused.stderr


@pytest.mark.parametrize(("words", "code"), [(["job=annotate"], 0), (["job=nope"], 2)])
def test_the_slurm_script_takes_the_task_s_share_and_passes_the_exit_code_on(
    words: list[str], code: int, tmp_path: Path
):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nexec "$@"\n')
    srun.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{COMMAND.parent}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_ARRAY_TASK_COUNT": "8",
    }
    script = asset("jobs") / "array.sbatch"
    done = subprocess.run(
        ["bash", script, "--cfg", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    if code == 0:
        assert yaml.safe_load(done.stdout)["launch"] == {"index": 1, "count": 8}


def ends_with(outcome: BaseException | int) -> types.SimpleNamespace:
    """A runner that ends in one way, whatever the mode."""

    def run(config: object, drain: object = None) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return types.SimpleNamespace(run=run, plan=run, preview=run)


@pytest.mark.parametrize(
    ("outcome", "code", "stderr"),
    [
        (0, 0, ""),
        (RuntimeError("broken engine"), 1, "RuntimeError: broken engine"),
        (ErrorBudgetExceeded("20 of 100 rows failed"), 3, "batchrun: 20 of 100 rows failed\n"),
        (FingerprintMismatch("other settings"), 4, "batchrun: other settings\n"),
        (OutputInUse("process 7 is writing"), 2, "batchrun: process 7 is writing\n"),
        (Drained("stopped by SIGTERM"), 75, "batchrun: stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 130, "batchrun: interrupted"),
    ],
)
def test_exit_codes(outcome: BaseException | int, code: int, stderr: str, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "batchrun.runner", ends_with(outcome))
    monkeypatch.setattr(batchrun, "runner", ends_with(outcome), raising=False)
    words = ["job=generate", "model=m", "input.path=x", "output.path=y"]
    assert cli.main(words) == code
    captured = capsys.readouterr()
    assert stderr in captured.err
    assert captured.out == ""
    assert ("Traceback" in captured.err) == (code == 1)
