"""A process that forks while it has an LLM: the engine stays with it, and the fork can say so and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engine.families import make_model

SCRIPT = """
import os, sys
from batchrun import LLM, SamplingParams

def main():
    few = SamplingParams(max_tokens=2)
    llm = LLM(sys.argv[1], device="cpu", num_blocks=64, num_threads=2, workers="1")
    before = llm.generate([[1, 2, 3]], few)[0].token_ids
    child = os.fork()
    if child == 0:
        for use in (lambda: llm.generate([[1, 2, 3]], few), lambda: next(llm.stream([[1]])), lambda: llm.abort(0)):
            try:
                use()
            except Exception as error:
                print(type(error).__name__, error)
        llm.close()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate([[1, 2, 3]], few)[0].token_ids == before
    print("the parent goes on")

if __name__ == "__main__":
    main()
"""


def test_a_fork_is_refused_the_engine_and_ends(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "llama")
    (tmp_path / "fork.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "fork.py"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BatchrunError this process is a fork of the one that made the LLM") == 3
    assert done.stdout.endswith("the parent goes on\n")
