"""A transformers causal language model that reads and writes paged KV."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from batchrun.config import EngineConfig
from batchrun.engine import hook
from batchrun.engine.adapted import adapted
from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry
from batchrun.engine.batch import Batch
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.feedback import Feedback
from batchrun.engine.gguf import loading_options, no_bar
from batchrun.engine.head import Head
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.layer_calls import settings_allow, shape_allows
from batchrun.engine.lora import merge
from batchrun.engine.precision import check_tf32, keep_angles_exact
from batchrun.engine.prequantized import placement
from batchrun.engine.staging import Staging
from batchrun.engine.support import UnsupportedModel, is_vision_language
from batchrun.errors import ConfigError
from batchrun_kernels.precision import TF32

log = logging.getLogger(__name__)


class PagedModel:
    """`hidden(batch)` computes a step, and `logits` what is asked of it; `backend` must be set before the first."""

    def __init__(self, module: Any) -> None:
        self.module: Any = module.eval().requires_grad_(False)
        self.device: torch.device = next(module.parameters()).device
        self.dtype: torch.dtype = float_type(module)
        self.vocab_size: int = module.get_input_embeddings().weight.shape[0]
        self.backend: AttentionBackend | None = None
        self.feedback: Feedback | None = None  # of steps that take tokens which the host has not read
        self.invariant = False  # on a GPU: whether a row has the same bits whatever is computed beside it
        self._head = Head(module)
        self._staging = Staging(self.device)
        self._staged: tuple[np.ndarray, torch.Tensor] | None = None  # places of logits: on the host, on the device
        self._adapters: np.ndarray | None = None  # of the tokens that were computed last
        self.layers = self._probe()

    def allow_tf32(self) -> None:
        """From now on let products of float32 be TF32's, but for those that make rotary angles."""
        keep_angles_exact(self.module, self.device)
        self._head.precision = TF32

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step: KV to the pages, and logits [K, vocabulary], in the model's type, of the rows that sample."""
        return self.logits(self.hidden(batch), batch.logits_index)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Compute a step: KV to the pages, and the hidden states [T, ...] of all its tokens, for `logits`."""
        backend = self.backend
        assert backend is not None
        index = batch.logits_index
        token_ids, positions, places = map(self._staging.put, (batch.token_ids, batch.positions, index))
        fed = None if batch.fed is None else self._staging.put(batch.fed)
        backend.begin(batch, self._staging)
        self._staging.send()
        self._staged, self._adapters = (index, places), batch.adapters
        attention = hook.forward_context(lambda call, q, k, v, _: backend.attend(call, q, k, v), backend)
        with attention, adapted(batch.adapters, self.device):
            if fed is not None:
                assert self.feedback is not None
                self.feedback.feed(token_ids, fed)
            return self._head.hidden(token_ids, positions)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        """Logits [K, vocabulary], in the model's type, at places [K] of what `hidden` gave last.

        If the model is `invariant` they are in float32: kernels divide sums by type, and some rows need that one.
        """
        with adapted(None if self._adapters is None else self._adapters[index], self.device):
            return self._logits(hidden[self._places(index)])

    def _places(self, index: np.ndarray) -> torch.Tensor:
        """On the device; those of the rows that sample came with their step."""
        if self._staged is None or not np.array_equal(index, self._staged[0]):
            self._staged = index, self._staging.put(index)
            self._staging.send()
        return self._staged[1]

    def run(self, token_ids: Any, positions: Any, logits_index: Any) -> torch.Tensor:
        """Logits [K, vocabulary] at places [K] of the flattened tokens [T], inside of a forward context."""
        hidden = self._head.hidden(self._tensor(token_ids), self._tensor(positions))
        return self._logits(hidden[self._tensor(logits_index)])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head.logits(hidden)
        return logits.float() if self.invariant else logits

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    @torch.inference_mode()
    def _probe(self) -> list[LayerGeometry]:
        """A dry forward over four tokens: the shape of each attention layer's KV, and how far back it looks.

        Raises UnsupportedModel if the layers that attend are not the layers that there are.
        """
        geometry: list[LayerGeometry] = []
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # held, so that no two lie at one address by chance

        def attend(call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
            # A layer that shares the KV of an earlier one passes that layer's own tensors.
            same = (i for i, kv in enumerate(seen) if [x.data_ptr() for x in kv] == [k.data_ptr(), v.data_ptr()])
            source = next(same, None)
            geometry.append(LayerGeometry(k.shape[1], k.shape[2], v.shape[2], source, call.window, q.shape[1]))
            seen.append((k, v))
            return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

        tokens = torch.arange(4)
        config = self.module.config
        with hook.forward_context(attend) as context:
            self.run(tokens, tokens, tokens[-1:])
        count = config.get_text_config(decoder=True).num_hidden_layers
        # More calls are fine: a layer that attends twice, or runs twice, has pages for each of its calls.
        if context.calls < count:
            raise UnsupportedModel(
                f"{config.model_type}: {context.calls} of its {count} layers attend through a backend; the others "
                "keep a state (linear attention, convolution, ...) or use attention code of their own"
            )
        if context.masked:
            raise UnsupportedModel(f"{config.model_type}: its attention needs a mask that depends on the data")
        return geometry

    @property
    def kv_layout(self) -> KvLayout:
        """How the layers' KV is divided into blocks."""
        return KvLayout.of(self.layers)


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> PagedModel:
    """Load the weights and hook the paged attention in. Of a vision-language model only the language part is used.

    Raises UnsupportedModel for families whose attention cannot be replaced, ConfigError for weights that are
    not those of the config or that need a package that is not there.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForImageTextToText if is_vision_language(checkpoint.config) else AutoModelForCausalLM
    module = load_module(checkpoint, auto_class, device, dtype, hook.NAME)
    return PagedModel(module)


def load_module(
    checkpoint: Checkpoint,
    auto_class: Any,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None = None,
    unused: tuple[str, ...] = (),
) -> Any:
    """The transformers module with its weights, on the device. `attention` names its attention code; without,
    transformers chooses.

    Tensors whose names begin with one of `unused` need not be in the files. Raises as `load_model` does.
    """
    options, family, gguf = checkpoint.model, checkpoint.config.model_type, checkpoint.gguf
    placed = placement(checkpoint.config, device)
    folder, source = (checkpoint.folder, {}) if gguf is None else (gguf.parent, loading_options(gguf))
    try:
        with _no_progress_bars(), nullcontext() if gguf is None else no_bar():
            module, report = auto_class.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=options.trust_remote_code,
                use_safetensors=None if options.allow_pickle else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                **source,
                **placed,
            )
    except ValueError as error:
        raise UnsupportedModel(f"model={options.path}: {error}") from error
    except ImportError as error:
        raise ConfigError(f"model={options.path}: {family} needs a package that is not installed: {error}") from error
    except KeyError as error:
        if attention is None or error.args != (attention,):
            raise
        raise UnsupportedModel(f"{family}: it picks its attention from a list of its own, where ours is not") from error
    _check_report(options.path, report, unused)
    if checkpoint.adapter is not None:
        merge(module, checkpoint.adapter)
    _ask_nothing_of_padding(module)
    return module if placed else module.to(device)


def _ask_nothing_of_padding(module: Any) -> None:
    """GPT-2 and some encoders look for padding among the ids of each forward, to warn: a GPU's host waits for that, and
    a step that does so cannot be recorded."""
    for each in module.modules():
        if hasattr(each, "warn_if_padding_and_no_attention_mask"):
            each.warn_if_padding_and_no_attention_mask = lambda *_: None


def _check_report(name: str | None, report: dict[str, Any], unused: tuple[str, ...]) -> None:
    """Raise ConfigError for what transformers would fill with random numbers."""
    for tensor, stored, expected in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"model={name}: its weights do not fit its config.json: {tensor} is {list(stored)} and should be "
            f"{list(expected)}"
        )
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(unused)):
        raise ConfigError(f"model={name}: its weights lack {len(missing)} tensors, {missing[0]} among them")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws a bar even where stderr is a log file."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def float_type(module: Any) -> torch.dtype:
    """In which type a module computes: that of the first of its weights that are no integers of a quantised product."""
    return next(x.dtype for x in module.parameters() if x.dtype in (torch.float32, torch.bfloat16, torch.float16))


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device={name!r} is not a device: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device={name} is not there: {torch.cuda.device_count()} CUDA devices are visible")
    return device


def choose_dtype(
    name: str, checkpoint: Checkpoint, device: torch.device, engine: EngineConfig, *, encodes: bool = False
) -> torch.dtype:
    """`auto` is the checkpoint's type; on a CPU float16 becomes float32, since emulating it is slower, and bfloat16 too
    where the processor has no instructions for it, unless the model's layers will be compiled, which widen it in
    registers. For `tf32`, float32. `encodes`: the model gives vectors of texts.

    Raises ConfigError for tf32 on a device that has not got it.
    """
    if name == TF32:
        check_tf32(device)
        return torch.float32
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(checkpoint.text_config, "dtype", None) or getattr(checkpoint.config, "dtype", None)
    dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    if device.type != "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return dtype
    compiles = not encodes and settings_allow(checkpoint, engine) and shape_allows(checkpoint.text_config)
    if dtype == torch.float16 or not (_cpu_has_bfloat16() or compiles):
        log.info("the checkpoint is %s; computing in float32 on this CPU", dtype)
        return torch.float32
    return dtype


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """How numbers are computed that `model.dtype` asks for, where `choose_dtype` chose this type."""
    return TF32 if name == TF32 else str(dtype).removeprefix("torch.")


def _cpu_has_bfloat16() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith("AVX512") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
