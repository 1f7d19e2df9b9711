"""The `batchrun` command: words of the command line → config → exit code. See docs/exit-codes.md."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from batchrun import __version__
from batchrun.config import Config
from batchrun.errors import BatchrunError, ConfigError
from batchrun.signals import INTERRUPTED, Drain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Results go to stdout, everything else to stderr."""
    try:
        return _dispatch(_parser().parse_intermixed_args(arguments))
    except BatchrunError as error:
        print(f"batchrun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("batchrun: interrupted; the same command goes on from the finished parts", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone (`batchrun --keys | head`): keep the interpreter from flushing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return 1


def _dispatch(options: argparse.Namespace) -> int:
    if options.version:
        print(f"batchrun {__version__}")
        return 0
    # Composing takes Hydra, which `--version` need not wait for.
    from batchrun import usage
    from batchrun.compose import choices, compose_config

    if options.keys:
        print(usage.keys_text(), flush=True)
        return 0
    if options.help:
        print(usage.help_text(choices(options.config_dir)), flush=True)
        return 0
    if not options.overrides and not options.cfg:
        raise ConfigError(f"nothing to do: {usage.USAGE}\n`batchrun --help` shows the jobs and what can be set")
    config = compose_config(options.overrides, options.config_dir)
    if options.cfg:
        print(_as_yaml(config), end="", flush=True)
        return 0
    return _run(config)


def _run(config: Config) -> int:
    from batchrun import demo
    from batchrun.compose import missing

    if wants := missing(config):
        raise ConfigError("\n  ".join(["the job is not complete:", *wants]) if len(wants) > 1 else wants[0])
    _log_to_stderr()
    if config.mode in ("status", "merge", "reparse"):
        from batchrun.report import merge, reparse, status

        return {"status": status.status, "merge": merge.merge, "reparse": reparse.reparse}[config.mode](config)
    demo.check(config)
    if config.mode == "run":
        drain = Drain(config.run.drain_seconds)
        # From here on, for torch alone takes seconds to import.
        with drain.listening():
            from batchrun import runner

            return runner.run(config, drain)
    if config.mode == "bench":
        with Drain().listening():  # so that no engine is left behind
            from batchrun.bench import bench

            return bench.run(config)
    from batchrun import dry

    return {"plan": dry.plan, "preview": dry.preview}[config.mode](config)


def _as_yaml(config: Config) -> str:
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True, width=120)


class _Handler(logging.Handler):
    """Log lines on stderr that leave a live progress line whole."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def _log_to_stderr() -> None:
    logging.basicConfig(handlers=[_Handler()], format="%(message)s", level=logging.WARNING)
    logging.getLogger("batchrun").setLevel(logging.INFO)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `batchrun --help` shows the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("batchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", type=Path)
    for flag in ("--cfg", "--keys", "--version"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    return parser
