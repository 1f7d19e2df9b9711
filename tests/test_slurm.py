"""The Slurm script, run by bash with stand-ins for Slurm's commands and for batchrun."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from batchrun.assets import asset

PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "$*" >> "$FOLDER/scontrol.log"; exit ${SCONTROL_CODE:-0}',
    "batchrun": 'echo "$*" > "$FOLDER/words"; exit $CODE',
}
SLOW = """
trap 'exit 75' TERM USR1
echo started
for i in $(seq 600); do sleep 0.1; done
"""


class Slurm:
    """A folder of programs that the script finds first."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder = folder
        for name, body in {**PROGRAMS, **programs}.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        here = {"PATH": f"{self.folder}:{os.environ['PATH']}", "FOLDER": str(self.folder)}
        task = {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
        return subprocess.Popen(
            ["bash", asset("jobs") / "array.sbatch", *words],
            env={**os.environ, **here, **task, **environment},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def requeued(self) -> list[str]:
        log = self.folder / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (3, False), (4, False), (75, True)])
def test_a_drained_task_is_requeued_and_every_code_is_passed_on(tmp_path: Path, code: int, requeued: bool) -> None:
    slurm = Slurm(tmp_path)
    process = slurm.start("job=annotate", "prompt.template=two words", CODE=str(code))
    assert process.wait(timeout=60) == code
    assert slurm.requeued == (["requeue 1234_3"] if requeued else [])
    words = (tmp_path / "words").read_text()
    assert words.startswith("launch=slurm_array run.drain_seconds=")
    assert words.endswith("job=annotate prompt.template=two words\n")


def test_a_requeue_that_fails_is_told(tmp_path: Path) -> None:
    process = Slurm(tmp_path).start(CODE="75", SCONTROL_CODE="1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "submit the array again" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_task_leaves_the_shell_to_requeue(tmp_path: Path, number: int) -> None:
    slurm = Slurm(tmp_path, batchrun=SLOW)
    process = slurm.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == 75
    assert slurm.requeued == ["requeue 1234_3"]


def test_the_script_gives_time_for_draining() -> None:
    script = (asset("jobs") / "array.sbatch").read_text()
    warning = int(script.partition("--signal=USR1@")[2].split()[0])
    drain = int(script.partition("run.drain_seconds=")[2].split()[0])
    assert drain + 20 <= warning
