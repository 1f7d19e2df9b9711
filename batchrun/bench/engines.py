"""Which engines there are, how they can be set, and in which interpreter each one runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchrun.bench import adapters
from batchrun.config import BenchConfig, Config
from batchrun.errors import ConfigError

ADAPTERS = Path(adapters.__file__).parent
OURS = "batchrun"


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine that there is an adapter for."""

    module: str  # must be importable where the engine runs
    settings: dict[str, Any]  # what `name:key=value` can set, with defaults
    own_model: str | None = None  # what bench.models must name, for engines that cannot read a transformers folder


KINDS = {
    # static: rows run in batches of so many, each to its end before the next begins; 0 is continuous.
    OURS: Kind("batchrun", {"static": 0}),  # and all that section `engine` has
    # batch: rows in one; tokens: instead, as many rows as pad to so many tokens; sort: by length of the prompt.
    "transformers": Kind("transformers", {"batch": 32, "tokens": 0, "sort": True, "use_cache": True}),
    "transformers_continuous": Kind(
        "transformers", {"max_num_seqs": 16, "max_batched_tokens": 512, "block_size": 32, "scheduler": "fifo"}
    ),
    "vllm": Kind(
        "vllm",
        {"max_num_seqs": 32, "max_batched_tokens": 2048, "prefix_caching": True, "enforce_eager": False},
    ),
    "openvino": Kind(
        "openvino_genai",
        {
            "max_num_seqs": 32,
            "max_batched_tokens": 1024,
            "prefix_caching": True,
            "split_fuse": True,
            "kv_precision": "model",
        },
        "a folder exported by optimum-cli",
    ),
    "llama_cpp": Kind("llama_cpp", {"max_batched_tokens": 512}, "a GGUF file"),
}
FOUND = "rivals"  # in bench.engines: those that are installed
RIVALS = ("vllm", "openvino", "llama_cpp")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine with its settings, ready to be started."""

    label: str  # as in bench.engines
    kind: str
    settings: dict[str, Any]
    python: str
    model: str

    @property
    def ours(self) -> bool:
        return self.kind == OURS

    @property
    def adapter(self) -> Path:
        return ADAPTERS / f"{self.kind}_engine.py"


def choose_engines(config: Config, model: str) -> list[EngineSpec]:
    """The engines of bench.engines, ours first. `model` is the transformers folder. Raises ConfigError."""
    bench = config.bench
    for key, names in (("python", bench.python), ("models", bench.models)):
        if unknown := set(names) - set(KINDS):
            raise ConfigError(f"bench.{key} names {', '.join(sorted(unknown))}: the engines are {', '.join(KINDS)}")
    asked = bench.engines if bench.engines != ["auto"] else [OURS, "transformers", FOUND]
    labels = [each for label in asked for each in (_found(bench) if label == FOUND else [label])]
    specs = [parse_engine(label, config, model) for label in dict.fromkeys(labels)]
    for spec in specs:
        _check_installed(spec)
    return sorted(specs, key=lambda spec: not spec.ours)


def parse_engine(label: str, config: Config, model: str) -> EngineSpec:
    """An engine from `name` or `name:key=value:key=value`. Raises ConfigError for what there is not."""
    name, *pairs = label.split(":")
    if name not in KINDS:
        raise ConfigError(f"bench.engines has {name!r}: the engines are {', '.join(KINDS)}")
    kind = KINDS[name]
    settings = {**kind.settings, **dataclasses.asdict(config.engine)} if name == OURS else dict(kind.settings)
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in settings or not value:
            raise ConfigError(f"bench.engines has {label!r}: {name} takes {', '.join(settings)}, as key=value")
        settings[key] = value if isinstance(settings[key], str) else yaml.safe_load(value)
    if kind.own_model and name not in config.bench.models:
        raise ConfigError(f"engine {name} cannot read {model}: set bench.models.{name} to {kind.own_model}")
    own = Path(config.bench.models.get(name, model)).expanduser()
    if name in config.bench.models and not own.exists():
        raise ConfigError(f"bench.models.{name}={own} is not there")
    return EngineSpec(label, name, settings, python_of(name, config.bench), str(own))


def python_of(name: str, bench: BenchConfig) -> str:
    """The interpreter that has the engine: as configured, else this one."""
    given = bench.python.get(name)
    return sys.executable if given is None else str(Path(given).expanduser())


def _found(bench: BenchConfig) -> list[str]:
    """Rivals that are installed and have the model they need."""
    usable = (name for name in RIVALS if not KINDS[name].own_model or name in bench.models)
    return [name for name in usable if name in bench.python or _has(sys.executable, KINDS[name].module)]


def _check_installed(spec: EngineSpec) -> None:
    module = KINDS[spec.kind].module
    if not spec.ours and not _has(spec.python, module):
        raise ConfigError(
            f"{spec.python} has no module {module}, which engine {spec.kind} needs: "
            f"set bench.python.{spec.kind} to an interpreter that has it"
        )


def _has(python: str, module: str) -> bool:
    program = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"{python} cannot be started: {error}") from error
