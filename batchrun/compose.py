"""From the words of the command line to one checked `Config`: the only module that knows Hydra.

Hydra composes and nothing more: its compose API neither changes the working folder nor makes one, and sets up
no logging. Whatever it finds wrong comes out as a ConfigError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from batchrun.assets import asset, cache_folder
from batchrun.config import Config
from batchrun.errors import ConfigError
from batchrun.overrides import GROUPS, PROMPT_SOURCES, emptied, suggest, translate
from batchrun.typed import decode, encode, split_list

SEARCH_PATH = "hydra.searchpath"

OmegaConf.register_new_resolver("batchrun.cache", lambda name: str(cache_folder() / name), replace=True)


class Choices(NamedTuple):
    """What can be named on the command line: each job and each option of a group, with a line about it."""

    jobs: dict[str, str]
    groups: dict[str, dict[str, str]]


def compose_config(arguments: Sequence[str], config_dir: Path | None = None) -> Config:
    """The job that the command line describes.

    `config_dir` is a folder of the user's own, with job/NAME.yaml and options of the groups. A relative
    `prompt.template_file`, `prompt.chat_template`, a schema or a grammar that names a file is made absolute: looked up
    beside the job first, then from the working folder; the other way round when it was typed on the command line.
    Raises ConfigError.
    """
    places, arguments = _search_path(arguments, config_dir)
    with _explained(), _hydra(_template_folders(places)) as loader:
        extra = [f"{SEARCH_PATH}=[{','.join(map(encode, places))}]"]
        options = {group: _options(loader, group, extra) for group in ("job", *GROUPS)}
        composed = compose("config", overrides=[*extra, *translate(arguments, options)])
        for key, names in emptied(arguments).items():
            kept = {name: value for name, value in (OmegaConf.select(composed, key) or {}).items() if name in names}
            OmegaConf.update(composed, key, kept, merge=False)
        config = _as_dataclass(composed)
    typed = {argument.partition("=")[0].lstrip("+") for argument in arguments}
    _find_templates(config, _template_folders(places), typed)
    return config


def missing(config: Config) -> list[str]:
    """What the job still needs before it can start, each as a sentence; empty when nothing is missing."""
    prompt = config.prompt.prompts or any(
        getattr(config.prompt, key.partition(".")[2]) is not None for key in PROMPT_SOURCES
    )
    prompt = prompt or config.rank.query is not None
    bench = config.mode == "bench"
    if config.mode in ("status", "merge", "reparse"):
        folder = "output.path is not set: name the output folder of a job, e.g. output.path=out/labels"
        target = "output.merge_path is not set: name a new folder for the merged files, e.g. out/labels-merged"
        there = {folder: config.output.path, target: config.output.merge_path or config.mode != "merge"}
        return [sentence for sentence, given in there.items() if not given]
    wants = {
        "input.path is not set: name Parquet files, e.g. input.path=reviews/*.parquet": config.input.path or bench,
        "output.path is not set: name a folder, e.g. output.path=out/labels": config.output.path
        or config.mode in ("plan", "preview"),
        "model.path is not set: name a folder or a hub id, e.g. model=Qwen/Qwen2.5-0.5B-Instruct": config.model.path
        or (bench and config.bench.kind in ("scheduler", "pipeline", "gpu")),
        "there is no prompt: choose a job, e.g. job=generate, or set prompt.template": prompt or bench,
    }
    return [sentence for sentence, there in wants.items() if not there]


def template_folders(config_dir: Path | None = None) -> list[Path]:
    """Where a job's template files are looked up: beside the user's own jobs, then beside the shipped ones."""
    return _template_folders(_search_path((), config_dir)[0])


def choices(config_dir: Path | None = None) -> Choices:
    """The jobs and the options of each group, shipped and the user's own.

    Raises ConfigError when `config_dir` is no folder or a file in it is not YAML.
    """
    places, _ = _search_path((), config_dir)
    folders = [*map(_folder, places), asset("conf")]
    groups = {
        group: {path.stem: _comment(path) for folder in folders for path in sorted((folder / group).glob("*.yaml"))}
        for group in GROUPS
    }
    jobs = {}
    for folder in reversed(_template_folders(places)):
        for path in sorted(folder.glob("*.yaml")):
            about = _load(path).get("job")
            jobs[path.stem] = str(about.get("description", "")) if isinstance(about, dict) else ""
    return Choices(jobs, groups)


def _search_path(arguments: Sequence[str], config_dir: Path | None) -> tuple[list[str], list[str]]:
    """The user's config folders as URLs, from --config-dir and hydra.searchpath, and all other arguments."""
    places = [] if config_dir is None else [str(config_dir)]
    rest = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == SEARCH_PATH:
            places += [decode(item) for item in split_list(value if value.startswith("[") else f"[{value}]")]
        else:
            rest.append(argument)
    places = [place if place.startswith("pkg://") else f"file://{_folder(place)}" for place in places]
    for place in places:
        if not place.startswith("pkg://") and not _folder(place).is_dir():
            raise ConfigError(f"the config folder {_folder(place)} is not a folder")
    return places, rest


def _folder(place: str) -> Path:
    return Path(place.removeprefix("file://")).expanduser().absolute()


def _template_folders(places: Sequence[str]) -> list[Path]:
    return [*(_folder(place) / "job" for place in places if not place.startswith("pkg://")), asset("jobs")]


@contextmanager
def _hydra(job_folders: Sequence[Path]) -> Iterator[ConfigLoader]:
    """Hydra with the schema, conf/ and jobs/ in place."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.repo.pop("job", None)
    for path in asset("jobs").glob("*.yaml"):
        # Hydra would merge a file with a stored config of the same name; the user's own job replaces ours.
        if next(folder for folder in job_folders if (folder / path.name).is_file()) == path.parent:
            store.store(group="job", name=path.stem, node=OmegaConf.create(_load(path)), package="_global_")
    with initialize_config_dir(str(asset("conf")), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _options(loader: ConfigLoader, group: str, overrides: list[str]) -> list[str]:
    found = loader.get_group_options(group, ObjectType.CONFIG, config_name="config", overrides=overrides)
    return sorted(set(found))


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold settings as `key: value`, not {type(loaded).__name__}")
    return loaded


def _comment(path: Path) -> str:
    """The first line of a config file that says something about it."""
    lines = (line.lstrip("# ") for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
    return next((line for line in lines if line and not line.startswith("@package")), "")


def _as_dataclass(composed: DictConfig) -> Config:
    """The composed tree as dataclasses, whose own checks run here."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise ConfigError("the composed settings do not follow the schema: conf/config.yaml must begin with `schema`")
    return config


def _find_templates(config: Config, folders: Sequence[Path], typed: set[str]) -> None:
    """Make the files of the prompt and the JSON Schema absolute paths; see `compose_config`."""
    prompt = config.prompt
    if (name := prompt.template_file) is not None:
        places = _places(name, folders, "prompt.template_file" in typed)
        prompt.template_file = _first_file(places)
        if prompt.template_file is None:
            looked = ", ".join(map(str, places))
            raise ConfigError(f"prompt.template_file={name} is not a file; looked at {looked}")
    # Anything else is a template's text, or a name that the tokenizer knows.
    if (name := prompt.chat_template) is not None and "{" not in name:
        prompt.chat_template = _first_file(_places(name, folders, "prompt.chat_template" in typed)) or name
    if isinstance(name := config.output.schema, str) and "{" not in name:
        config.output.schema = _first_file(_places(name, folders, "output.schema" in typed)) or name
    structure = config.structure
    if isinstance(name := structure.json, str) and "{" not in name:
        structure.json = _first_file(_places(name, folders, "structure.json" in typed)) or name
    if (name := structure.grammar) is not None and ":" not in name:
        structure.grammar = _first_file(_places(name, folders, "structure.grammar" in typed)) or name


def _places(name: str, folders: Sequence[Path], typed: bool) -> list[Path]:
    order = [Path.cwd(), *folders] if typed else [*folders, Path.cwd()]
    return list(dict.fromkeys(folder / Path(name).expanduser() for folder in order))


def _first_file(places: Sequence[Path]) -> str | None:
    return next((str(place) for place in places if place.is_file()), None)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into a ConfigError."""
    try:
        yield
    except yaml.YAMLError as error:
        raise ConfigError(f"a config file is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError("a config file names itself in its `defaults`, or two name each other") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from None


def _explain(error: Exception) -> str:
    """What is wrong, where, and what to write instead, from the messages of an error and its cause."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override.lstrip('+')} cannot be read: a list is written [a, b] and a mapping {{a: 1, b: 2}}, with "
            "quotes around a value that holds other signs than letters, digits and spaces"
        )
    text = "\n".join(str(part) for part in (error, error.__cause__) if part and str(part))
    key = _match(r"full_key: (\S+)", text)
    file = _match(r"In '([^']+)'", text)
    where = f" in {file}.yaml" if file and "/" in file else ""
    if unknown := _match(r"Key '(.+?)' not in '\w+'", text):
        if key.startswith("job.") and unknown in {field.name for field in dataclasses.fields(Config)}:
            return f"{file}.yaml must begin with the line `# @package _global_`, so that it can set keys outside job"
        return f"there is no setting {key!r}{where}{suggest(key)}"
    if isinstance(error.__cause__ or error, (InterpolationResolutionError, GrammarParseError)):
        return f"{key}{where}: {_first_line(error.__cause__ or error)}{_interpolation_hint(key)}"
    if "Could not find" in text:
        return re.sub(r"\s+", " ", text.partition("Config search path")[0].removeprefix("In 'config': ")).strip()
    detail = (
        _first_line(error.__cause__)
        if error.__cause__
        else next((line for line in text.splitlines() if line and not line.startswith("In '")), type(error).__name__)
    )
    return f"{key}{where}: {detail}" if key else detail


def _interpolation_hint(key: str) -> str:
    if key.startswith("launch."):
        return "; launch=slurm_array is for the tasks of a Slurm array, sbatch --array=0-9"
    return "; `${` starts an interpolation: write \\${ for the characters, or {{ column }} for a column of the row"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
