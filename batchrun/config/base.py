"""What every section is made of: a setting, and the checks of its value.

OmegaConf refuses `Literal` and unions, so closed lists are strings checked here, and a setting that takes a
value or a list is `Any`, normalised in `__post_init__`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from batchrun.errors import ConfigError


def setting(default: Any, help: str, *, identity: bool) -> Any:
    """A config leaf. `identity` says whether it changes completions: if so, it enters the fingerprint."""
    metadata = {"help": help, "identity": identity}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(allowed)}")


LARGEST = 2**63 - 1  # what Arrow and numpy hold as an integer
LONGEST_S = 1e9  # thirty years: more than any run, and less than what a thread can wait for


def in_range(key: str, value: float | None, low: float, high: float = LARGEST, high_is: str = "") -> None:
    """Raise ConfigError for a value that is not a number from `low` to `high`, or to that of the setting `high_is`."""
    if value is not None and not low <= value <= high:
        most = f"{high_is}={high:g}" if high_is else f"{high:g}"
        limit = f"at least {low:g}" if high == LARGEST and value < low else f"between {low:g} and {most}"
        raise ConfigError(f"{key}={value} is out of range: it must be {limit}")


def strings(key: str, value: Any) -> list[str]:
    """One string, a list of strings or null, as a list."""
    if value is None:
        return []
    values = [value] if isinstance(value, str) else list(value)
    for item in values:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{key}={value!r} must be a non-empty string or a list of them")
    return values
