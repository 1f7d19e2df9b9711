"""What can go wrong on purpose: with a run, each with its exit code (docs/exit-codes.md), and with a single row."""

from __future__ import annotations

from typing import Literal

# What the column `error_type` may hold. docs/output.md says what each means.
ErrorType = Literal[
    "invalid_row",
    "template_error",
    "empty_prompt",
    "prompt_too_long",
    "constraint_error",
    "engine_error",
]


class BatchrunError(Exception):
    """A failure that the user can act on: printed as one message, without a traceback."""

    exit_code = 1


class StepError(BatchrunError):
    """The device has failed in a step of the engine, which is of no use from then on."""


class ConfigError(BatchrunError):
    """A setting that cannot work. The message names the value, the limit and the remedy."""

    exit_code = 2


class InputError(ConfigError):
    """Input rows, files or templates that cannot work, found before the model loads."""


class ErrorBudgetExceeded(BatchrunError):
    """More rows failed than the job allows; every finished row is kept."""

    exit_code = 3


class FingerprintMismatch(BatchrunError):
    """The output folder belongs to a job with other settings or other input."""

    exit_code = 4


class OutputInUse(ConfigError):
    """Another process is at work on the same share of the same output."""


class Drained(BatchrunError):
    """A signal asked the run to stop; what was finished is kept, and the same command goes on from there."""

    exit_code = 75
