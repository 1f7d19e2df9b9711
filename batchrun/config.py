"""The one schema of every setting: names, types, limits, and which settings change a completion.

Hydra composes these dataclasses from conf/, jobs/ and the command line; nothing else in the package
knows Hydra. OmegaConf refuses `Literal` and unions, so closed lists are strings checked here, and a
setting that takes a value or a list is `Any`, normalised in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from batchrun.errors import ConfigError

MODES = ("run", "plan", "preview", "bench", "status", "merge", "reparse")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION = ("auto", "torch", "cpu")
INPUT_FORMATS = ("auto", "parquet", "jsonl", "csv", "arrow", "hf", "openai")
SCHEMA_MODES = ("strict", "intersect", "union")
RETRIES = ("error", "length")
SEED_BY = ("row", "content")
PARSES = ("none", "json")
PROMPT_KINDS = ("chat", "completion")
OVERLONG = ("error", "truncate_left", "truncate_right", "truncate_middle", "skip")
ON_EMPTY = ("error", "skip", "send")
MAX_PATTERN = 1024  # tokens that are looked back for repetition
BENCH_KINDS = ("engines", "scheduler", "pipeline", "article")
COMPRESSION = ("zstd", "snappy", "gzip", "lz4", "none")


def setting(default: Any, help: str, *, identity: bool) -> Any:
    """A config leaf. `identity` says whether it changes completions: if so, it enters the fingerprint."""
    metadata = {"help": help, "identity": identity}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(allowed)}")


def _range(key: str, value: float | None, low: float, high: float = math.inf) -> None:
    if value is not None and not low <= value <= high:
        limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(f"{key}={value} is out of range: it must be {limit}")


def _strings(key: str, value: Any) -> list[str]:
    """One string, a list of strings or null, as a list."""
    if value is None:
        return []
    values = [value] if isinstance(value, str) else list(value)
    for item in values:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{key}={value!r} must be a non-empty string or a list of them")
    return values


@dataclass
class JobConfig:
    """What `job=` selected."""

    name: str = setting("", "name of the job, for messages and metrics", identity=False)
    description: str = setting("", "what the job does, in one line", identity=False)


@dataclass
class ModelConfig:
    """Which weights, and how they are loaded."""

    path: str | None = setting(None, "local folder or hub id of a transformers model", identity=True)
    revision: str | None = setting(None, "branch, tag or commit of a hub id", identity=True)
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer", identity=True)
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16", identity=True)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", identity=False)
    max_model_len: int | None = setting(
        None, "longest prompt + completion in tokens; default: the model's", identity=True
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the checkpoint", identity=True)
    allow_pickle: bool = setting(False, "load .bin weights too; they can run code when opened", identity=False)

    def __post_init__(self) -> None:
        _choice("model.dtype", self.dtype, DTYPES)
        _range("model.max_model_len", self.max_model_len, 2)


@dataclass
class EngineConfig:
    """How tokens are computed: speed and memory only, never what a completion says."""

    attention: str = setting("auto", "attention backend: auto, torch or cpu", identity=False)
    block_size: int = setting(32, "tokens in one page of the KV cache", identity=False)
    num_blocks: int | None = setting(None, "pages in the KV cache; default: from kv_cache_gib", identity=False)
    kv_cache_gib: float | None = setting(
        None, "memory for the KV cache in GiB; default: from the free memory", identity=False
    )
    max_num_seqs: int = setting(256, "most sequences running at once", identity=False)
    max_batched_tokens: int = setting(2048, "most tokens computed in one step", identity=False)
    prefix_caching: bool = setting(True, "reuse pages of prompts that begin alike", identity=False)
    fused_layers: bool = setting(
        True, "rebuild decoder layers with merged products, where they compute the same", identity=False
    )
    workers: str = setting(
        "auto", "engine processes: a number, or auto (one per GPU; small models on a CPU: one per core)", identity=False
    )
    num_threads: int | None = setting(None, "CPU threads; default: all cores given to the process", identity=False)

    def __post_init__(self) -> None:
        _choice("engine.attention", self.attention, ATTENTION)
        _range("engine.block_size", self.block_size, 1, 1024)
        _range("engine.num_blocks", self.num_blocks, 2)
        _range("engine.max_num_seqs", self.max_num_seqs, 1, 65536)
        _range("engine.max_batched_tokens", self.max_batched_tokens, 1)
        _range("engine.num_threads", self.num_threads, 1)
        if self.workers != "auto" and not (self.workers.isdecimal() and int(self.workers) >= 1):
            raise ConfigError(f"engine.workers={self.workers!r} must be auto or a number from 1")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ConfigError(f"engine.kv_cache_gib={self.kv_cache_gib} must be above 0")


@dataclass
class SamplingConfig:
    """How the next token is chosen and when a row ends. Names follow vLLM and OpenAI."""

    max_tokens: int = setting(128, "most tokens generated for a row", identity=True)
    temperature: float = setting(0.0, "0 is greedy; higher is more random", identity=True)
    top_p: float = setting(1.0, "sample from the smallest set with this much probability", identity=True)
    top_k: int = setting(0, "sample from the k most likely tokens; 0 is all", identity=True)
    seed: int = setting(0, "seed of the job; each row's own seed follows from it", identity=True)
    seed_by: str = setting(
        "row",
        "what else a row's seed follows from: row (its place) or content: equal prompts, equal samples",
        identity=True,
    )
    stop: Any = setting(None, "a string or list of strings that end a completion; cut from the text", identity=True)
    stop_token_ids: list[int] = setting([], "token ids that end a completion", identity=True)
    ignore_eos: bool = setting(False, "go on after an end-of-sequence token", identity=True)
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text", identity=True)
    repetition_max_pattern: int = setting(
        0, "end a completion whose last tokens are one pattern of up to so many tokens, repeated; 0: off", identity=True
    )
    repetition_min_pattern: int = setting(1, "tokens that such a pattern has at least", identity=True)
    repetition_min_count: int = setting(8, "times that the pattern must stand there in a row", identity=True)

    def __post_init__(self) -> None:
        _choice("sampling.seed_by", self.seed_by, SEED_BY)
        _range("sampling.max_tokens", self.max_tokens, 1)
        _range("sampling.temperature", self.temperature, 0)
        _range("sampling.top_k", self.top_k, 0)
        _range("sampling.seed", self.seed, 0, 2**63 - 1)
        _range("sampling.repetition_max_pattern", self.repetition_max_pattern, 0, MAX_PATTERN)
        _range("sampling.repetition_min_pattern", self.repetition_min_pattern, 1, MAX_PATTERN)
        _range("sampling.repetition_min_count", self.repetition_min_count, 2)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p={self.top_p} is out of range: it must be above 0 and at most 1")
        if math.isnan(self.temperature) or math.isinf(self.temperature):
            raise ConfigError(f"sampling.temperature={self.temperature} must be a finite number")
        self.stop = _strings("sampling.stop", self.stop)


@dataclass
class PromptConfig:
    """How a row becomes token ids: exactly one of template, template_file, messages, prompt_ids."""

    kind: str = setting("chat", "chat: through the model's chat template; completion: the text as it is", identity=True)
    template: str | None = setting(None, "Jinja2 template over the row's columns", identity=True)
    template_file: str | None = setting(
        None, "file with the template; looked up beside the job, then as a path", identity=True
    )
    messages: str | None = setting(None, "column with a list of {role, content}", identity=True)
    prompt_ids: str | None = setting(None, "column with ready token ids", identity=True)
    params: str | None = setting(
        None, "column with a row's own sampling parameters: a struct or JSON text with keys of sampling", identity=True
    )
    system: str | None = setting(None, "system prompt (a Jinja2 template too)", identity=True)
    examples: list[dict[str, str]] = setting([], "few-shot examples: a list of {user, assistant}", identity=True)
    prefill: str | None = setting(None, "text that the answer starts with (a Jinja2 template too)", identity=True)
    chat_template: str | None = setting(None, "chat template text, or a file, in place of the model's", identity=True)
    chat_template_kwargs: dict[str, Any] = setting({}, "extra variables for the chat template", identity=True)
    overlong: str = setting(
        "error",
        "what becomes of a prompt that is too long: error, skip, or truncate_left, _right or _middle to cut its text",
        identity=True,
    )
    reserve_tokens: int | None = setting(
        None,
        "tokens of the window that a prompt must leave; default: 1, and the row's max_tokens where prompts are cut",
        identity=True,
    )
    on_empty: str = setting(
        "error",
        "what becomes of a row whose columns in the prompt are all null or blank: error, skip or send",
        identity=True,
    )

    def __post_init__(self) -> None:
        _choice("prompt.kind", self.kind, PROMPT_KINDS)
        _choice("prompt.overlong", self.overlong, OVERLONG)
        _choice("prompt.on_empty", self.on_empty, ON_EMPTY)
        _range("prompt.reserve_tokens", self.reserve_tokens, 1)
        given = [k for k in ("template", "template_file", "messages", "prompt_ids") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"prompt.{' and prompt.'.join(given)} are both set: a prompt has one source; set the others to null"
            )
        for example in self.examples:
            if set(example) != {"user", "assistant"}:
                raise ConfigError(
                    f"prompt.examples has {dict(example)}: each example needs the keys user and assistant, and no other"
                )
        if self.kind == "completion" and (self.system or self.examples or self.messages or self.chat_template):
            raise ConfigError(
                "prompt.kind=completion sends the text as it is: put system text and examples "
                "in the template, or use prompt.kind=chat"
            )


@dataclass
class InputConfig:
    """Where rows come from."""

    format: str = setting(
        "auto", "auto (by the files' endings), parquet, jsonl, csv, arrow, hf or openai", identity=False
    )
    path: Any = setting(
        None, "file, folder (searched to any depth), glob, URL, or list of them; a data set for hf", identity=False
    )
    columns: Any = setting(None, "columns to read; default: all", identity=False)
    filter: str | None = setting(
        None, "condition on a row's columns, as in: rating >= 4 and lang == 'en'", identity=True
    )
    sample: float | None = setting(
        None, "below 1: this share of the rows; from 1 on: this many rows; the same ones for a seed", identity=True
    )
    sample_seed: int = setting(0, "another seed is another sample", identity=True)
    limit: int | None = setting(None, "read this many rows at most, in input order", identity=True)
    schema: str = setting(
        "strict", "files whose columns differ: strict (refuse), intersect or union of their columns", identity=True
    )
    types: dict[str, str] = setting(
        {}, "jsonl and csv: types of columns, as in input.types.id=string; json is the value's JSON text", identity=True
    )
    delimiter: str | None = setting(None, "csv: between fields; default: a tab for .tsv, else a comma", identity=True)
    quote: str | None = setting('"', "csv: around fields that hold a delimiter; null: quotes are text", identity=True)
    name: str | None = setting(None, "hf: configuration of the data set", identity=False)
    split: str | None = setting(None, "hf: split; default: the only one", identity=False)
    revision: str | None = setting(None, "hf: branch, tag or commit of the data set", identity=False)
    streaming: bool = setting(
        False, "hf: read from where the data set lies, without a copy in the cache", identity=False
    )
    storage_options: dict[str, Any] = setting(
        {},
        "for URLs: options of the fsspec file system, such as endpoint_url; keep secrets in the environment",
        identity=False,
    )

    def __post_init__(self) -> None:
        _choice("input.format", self.format, INPUT_FORMATS)
        _choice("input.schema", self.schema, SCHEMA_MODES)
        _range("input.limit", self.limit, 1)
        _range("input.sample_seed", self.sample_seed, 0)
        if self.sample is not None and not 0 < self.sample < 1 and not (self.sample >= 1 and self.sample % 1 == 0):
            raise ConfigError(
                f"input.sample={self.sample} is neither a share above 0 and below 1 nor a whole number of rows"
            )
        for key in ("delimiter", "quote"):
            value = getattr(self, key)
            if value is not None and (len(value) != 1 or value in "\r\n"):
                raise ConfigError(f"input.{key}={value!r} must be one character, and not the end of a line")
        self.path = _strings("input.path", self.path)
        self.columns = _strings("input.columns", self.columns) or None


@dataclass
class OutputConfig:
    """Where completions go, and how parts look."""

    path: str | None = setting(None, "output folder", identity=False)
    chunk_rows: int = setting(1000, "input rows in one part: the unit of work and of commit", identity=True)
    completion: str = setting("completion", "name of the column with the generated text", identity=True)
    prefix: str = setting("", "put before the name of each column that batchrun adds", identity=True)
    columns: Any = setting(None, "input columns to keep; default: all that were read", identity=True)
    parse: str = setting("none", "json: a column with the completion as a JSON value, beside its text", identity=False)
    schema: Any = setting(
        None,
        "JSON Schema that the completion must follow, which gives that column its type: a file, or inline",
        identity=False,
    )
    parsed: str = setting("parsed", "name of that column", identity=False)
    compression: str = setting("zstd", "zstd, snappy, gzip, lz4 or none", identity=False)
    journal_seconds: float = setting(
        5.0, "seconds between writes of finished rows whose part is not complete yet", identity=False
    )

    merge_path: str | None = setting(None, "mode=merge: new folder for the merged files", identity=False)
    merge_mib: int = setting(512, "mode=merge: size of a merged file in MiB, at least", identity=False)
    overwrite: bool = setting(False, "replace the output of a job with other settings or input", identity=False)

    def __post_init__(self) -> None:
        _range("output.chunk_rows", self.chunk_rows, 1)
        _choice("output.compression", self.compression, COMPRESSION)
        _choice("output.parse", self.parse, PARSES)
        if self.schema is not None and self.parse == "none":
            raise ConfigError("output.schema describes JSON: set output.parse=json too, or output.schema=null")
        if self.schema is not None and not isinstance(self.schema, (str, dict)):
            raise ConfigError(f"output.schema={self.schema!r} must be a JSON Schema, or a file with one")
        if not self.parsed:
            raise ConfigError("output.parsed is empty: name the column for the parsed completion")
        _range("output.journal_seconds", self.journal_seconds, 0.01)
        _range("output.merge_mib", self.merge_mib, 1)
        if not self.completion:
            raise ConfigError("output.completion is empty: name the column for the generated text")
        self.columns = None if self.columns is None else _strings("output.columns", self.columns)


@dataclass
class LaunchConfig:
    """Which share of the chunks this process takes: chunk i is done by worker i mod count."""

    index: int = setting(0, "this worker's number, from 0", identity=False)
    count: int = setting(1, "number of workers", identity=False)

    def __post_init__(self) -> None:
        _range("launch.count", self.count, 1)
        _range("launch.index", self.index, 0, self.count - 1)


@dataclass
class RunConfig:
    """How a run works, when it ends before its work does, and how it shows that it lives."""

    dedup: bool = setting(
        True, "compute rows with equal prompts once, where sampling is greedy or seeded by content", identity=False
    )
    max_error_rate: float = setting(0.5, "stop when a larger share of the rows fails; 1: never", identity=False)
    min_rows: int = setting(100, "rows that must be finished before the share counts", identity=False)
    drain_seconds: float = setting(20.0, "time to finish rows in flight after a signal to stop", identity=False)
    stall_seconds: float = setting(900.0, "give up when the engine makes no step for so long", identity=False)
    heartbeat_seconds: float = setting(15.0, "seconds between signs of life in the output folder", identity=False)

    def __post_init__(self) -> None:
        _range("run.max_error_rate", self.max_error_rate, 0, 1)
        _range("run.min_rows", self.min_rows, 1)
        _range("run.drain_seconds", self.drain_seconds, 0)
        _range("run.stall_seconds", self.stall_seconds, 0.1)
        _range("run.heartbeat_seconds", self.heartbeat_seconds, 0.1, 60)


@dataclass
class ReportConfig:
    """Progress and metrics."""

    interval: float = setting(30.0, "seconds between progress lines when stderr is not a terminal", identity=False)
    metrics: bool = setting(True, "write per-row and per-step metrics as Parquet", identity=False)

    def __post_init__(self) -> None:
        _range("report.interval", self.interval, 0.1)


@dataclass
class BenchConfig:
    """What `mode=bench` measures: see docs/performance.md."""

    kind: str = setting(
        "engines",
        "engines: side by side; scheduler: host time of a step; pipeline: the rest; article: one claim a line",
        identity=False,
    )
    engines: Any = setting(
        "auto",
        "engines, each with settings as in transformers:batch=8:sort=false; auto: ours and all that are found",
        identity=False,
    )
    workloads: Any = setting(
        ["annotate", "generate", "summarise", "single"],
        "fixed workloads; input.path adds one of your own rows",
        identity=False,
    )
    rounds: int = setting(3, "times that each engine runs a workload, in turn with the others", identity=False)
    rows: int | None = setting(
        None, "first rows of each workload; default: all (scheduler: 100,000, pipeline: 1,000,000)", identity=False
    )
    python: dict[str, str] = setting(
        {}, "interpreters that have an engine, as in bench.python.vllm=/venv/bin/python", identity=False
    )
    models: dict[str, str] = setting(
        {},
        "the model in an engine's own format, as in bench.models.openvino=FOLDER or bench.models.llama_cpp=FILE",
        identity=False,
    )
    kv_cache_gib: float = setting(
        4.0, "KV cache of each engine in GiB, where engine.kv_cache_gib is not set", identity=False
    )
    limit_seconds: float = setting(
        1800.0, "an engine that takes longer to load, or for one round, is given up", identity=False
    )
    running: int = setting(256, "scheduler: rows that run", identity=False)
    waiting: list[int] = setting(
        [1_000, 100_000, 1_000_000], "scheduler: rows that wait, one measurement each", identity=False
    )
    steps: int = setting(1000, "scheduler: steps of one measurement", identity=False)

    def __post_init__(self) -> None:
        _choice("bench.kind", self.kind, BENCH_KINDS)
        for key in ("rounds", "rows", "running", "steps"):
            _range(f"bench.{key}", getattr(self, key), 1)
        for count in self.waiting:
            _range("bench.waiting", count, 0)
        _range("bench.kv_cache_gib", self.kv_cache_gib, 0.01)
        _range("bench.limit_seconds", self.limit_seconds, 1)
        self.engines = _strings("bench.engines", self.engines)
        self.workloads = _strings("bench.workloads", self.workloads)


@dataclass
class Config:
    """A whole job."""

    mode: str = setting("run", "run, plan, preview, bench, status, merge or reparse", identity=False)
    preview_rows: int = setting(3, "rows shown by mode=preview", identity=False)
    retry: Any = setting(
        None, "make rows of finished parts again: error, length or both; sampling may differ then", identity=False
    )
    offline: bool = setting(False, "never ask the model hub; fail at once if a file is not local", identity=False)
    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)

    def __post_init__(self) -> None:
        _choice("mode", self.mode, MODES)
        _range("preview_rows", self.preview_rows, 1)
        self.retry = [kind for item in _strings("retry", self.retry) for kind in item.split(",")]
        for kind in self.retry:
            _choice("retry", kind, RETRIES)
        # Here and not with the section, because a row may set one of the two alone.
        sampling = self.sampling
        longest = sampling.repetition_max_pattern or MAX_PATTERN
        _range("sampling.repetition_min_pattern", sampling.repetition_min_pattern, 1, longest)
        if self.retry and self.output.overwrite:
            raise ConfigError("retry keeps an output and output.overwrite=true replaces it: set one of them")
        if self.input.format == "openai":
            self._take_requests()

    def _take_requests(self) -> None:
        """A request of OpenAI's batch file brings its own messages and parameters, in columns of these names."""
        prompt = self.prompt
        if all(value is None for value in (prompt.template, prompt.template_file, prompt.messages, prompt.prompt_ids)):
            prompt.messages = "messages"
        if prompt.params is None:
            prompt.params = "params"
        for key, columns in (("input.columns", self.input.columns), ("output.columns", self.output.columns)):
            if columns is not None and "custom_id" not in columns:
                raise ConfigError(f"{key}={columns} leaves out custom_id, by which answers to requests are told apart")


def leaves(schema: type = Config, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every setting by its dotted key, in the order of the schema."""
    import typing

    hints = typing.get_type_hints(schema)
    found: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(schema):
        key = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hints[f.name]):
            found |= leaves(hints[f.name], f"{key}.")
        else:
            found[key] = f
    return found


def lookup(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def identity(config: Config) -> dict[str, Any]:
    """The settings that change a completion, by dotted key, as plain values for JSON."""
    return {key: lookup(config, key) for key, f in leaves().items() if f.metadata["identity"]}
