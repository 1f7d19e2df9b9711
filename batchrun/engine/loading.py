"""From a checkpoint to an engine that has passed its check, in this process or in several."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from batchrun.config import EngineConfig
from batchrun.engine import torch_compile
from batchrun.engine.acceptance import check_model
from batchrun.engine.attention.base import AttentionBackend, kv_dtype
from batchrun.engine.attention.cpu import CpuAttention
from batchrun.engine.attention.registry import attention_backend, cache_backend, invariant_backend, page_size
from batchrun.engine.bursts import Bursts, StepCosts
from batchrun.engine.checkpoint import Checkpoint, eos_token_ids
from batchrun.engine.compiled import can_compile, compile_layers
from batchrun.engine.compiling import tell_of_compiling
from batchrun.engine.device import current, runs_triton
from batchrun.engine.device_memory import CudaMeter, DeviceMemory, measure_memory
from batchrun.engine.encoder import Encoder
from batchrun.engine.encoder_model import load_encoder_model
from batchrun.engine.engine import Engine
from batchrun.engine.host_pages import active_parameters, check_swap, make_swap
from batchrun.engine.invariance import check_invariance, check_setting, make_invariant
from batchrun.engine.kv_scales import read_scales
from batchrun.engine.layers import fuse_model
from batchrun.engine.linear import library_packs
from batchrun.engine.lora import install, name_products
from batchrun.engine.memory import make_pool
from batchrun.engine.model import PagedModel, choose_device, choose_dtype, load_model
from batchrun.engine.pool import EnginePool
from batchrun.engine.pooler import Pooler
from batchrun.engine.precision import float32_products
from batchrun.engine.prequantized import check_quantized
from batchrun.engine.quantized import check_int8, quantize_model
from batchrun.engine.recorder import CudaRecorder
from batchrun.engine.worker import place_workers
from batchrun.errors import ConfigError
from batchrun_kernels.precision import IEEE, TF32

log = logging.getLogger(__name__)


def load_engine(
    checkpoint: Checkpoint,
    tokenizer: Any,
    config: EngineConfig,
    rows: int | None = None,
    pooler: Pooler | None = None,
) -> Engine | Encoder | EnginePool:
    """The engine of this process, or a pool of engine processes if that is faster for a job of `rows` rows.

    With a `pooler` it gives vectors of texts, without one it generates.

    Without `rows` a pool is made only if `engine.workers` says so: a process that starts others must be able to
    be imported again, which a script or notebook need not be. Raises what `load_single` does.
    """
    placements = place_workers(checkpoint, config, rows, encodes=pooler is not None)
    if len(placements) > 1:
        return EnginePool(checkpoint, config, placements, pooler)
    return load_single(checkpoint, tokenizer, config, pooler=pooler)


def load_single(
    checkpoint: Checkpoint, tokenizer: Any, config: EngineConfig, sharers: int = 1, pooler: Pooler | None = None
) -> Engine | Encoder:
    """Load the weights, check that the engine serves them, and make room for the KV cache, if there is to be one.

    `sharers` processes divide the memory between them. Raises UnsupportedModel for a family that the check
    refuses, ConfigError for memory that is not there.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = choose_device(checkpoint.model.device)
    if device.type == "cpu":
        tell_of_compiling()
    with current(device):
        return _load(checkpoint, tokenizer, config, sharers, pooler, device)


def _load(
    checkpoint: Checkpoint,
    tokenizer: Any,
    config: EngineConfig,
    sharers: int,
    pooler: Pooler | None,
    device: torch.device,
) -> Engine | Encoder:
    dtype = choose_dtype(checkpoint.model.dtype, checkpoint, device, config, encodes=pooler is not None)
    check_quantized(checkpoint, device, dtype)
    if config.torch_compile:
        torch_compile.check_compile(config, checkpoint, device, encodes=pooler is not None)
    if config.batch_invariant:
        check_setting(config, device, adapters=bool(checkpoint.adapters), encodes=pooler is not None)
    if pooler is not None:
        encoder = load_encoder_model(checkpoint, pooler, device, dtype, pack=config.fused_layers)
        if checkpoint.model.dtype == TF32:
            encoder.allow_tf32()
        return Encoder(encoder, pooler.max_length, config.max_num_seqs, config.max_batched_tokens)
    check_swap(config.swap_space, attention_backend(config.attention, device))
    quantized = checkpoint.model.quantization == "int8"
    if quantized:
        check_int8(device, config.fused_layers)
    if config.cuda_graphs == "on" and not runs_triton(device):
        raise ConfigError(f"engine.cuda_graphs=on needs a GPU with Triton, not {device}: set engine.cuda_graphs=auto")
    backend = attention_backend(config.attention, device)  # what cannot be is refused before weights load
    paged = cache_backend(backend, config.kv_cache_dtype, device)
    if config.batch_invariant:
        invariant_backend(paged)
    page_size(config, backend)
    model = load_model(checkpoint, device, dtype)
    backend = attention_backend(config.attention, device, model.layers)
    paged = cache_backend(backend, config.kv_cache_dtype, device)
    if config.batch_invariant:
        paged = invariant_backend(paged)
    block_size = page_size(config, backend)
    config = replace(config, block_size=block_size)
    name_products(model.module)
    with float32_products(IEEE, device):  # what is compared is compared in full
        check_model(model, backend)
        if config.fused_layers:
            fuse_model(model, pack=not config.torch_compile)
        if config.torch_compile:
            torch_compile.compile_layers(model)
        if quantized:
            quantize_model(model)
    install(model, list(checkpoint.adapters.values()))
    if config.batch_invariant:
        make_invariant(model, paged)
    if checkpoint.model.dtype == TF32:
        model.allow_tf32()
    if config.batch_invariant:
        check_invariance(model, paged, block_size)
    max_model_len, left = checkpoint.max_model_len, None
    forced = config.cuda_graphs == "on"
    records = forced or (config.cuda_graphs == "auto" and runs_triton(device) and paged.name == "triton")
    if device.type == "cuda":
        memory, tokens = measure_memory(model, CudaMeter(device), config.max_batched_tokens, config.max_num_seqs)
        share = config.gpu_memory_utilization / -(-sharers // torch.cuda.device_count())
        config = replace(config, max_batched_tokens=tokens)
        memory = with_fixed(memory, model, paged, config, max_model_len, records=records)
        left = memory.left(share)
        log.info("%s", memory.explain(share))
    held = kv_dtype(config.kv_cache_dtype, model.dtype)
    pool = make_pool(config, model.kv_layout, held, max_model_len, device, sharers, left)
    cache = paged(model.layers, pool.num_blocks, block_size, model.dtype, device)
    if config.kv_cache_dtype == "fp8":
        use_scales(cache, checkpoint, model)
    model.backend = cache
    if isinstance(cache, CpuAttention) and not config.batch_invariant and can_compile(model, paged, dtype):
        compile_layers(model, cache, config.num_threads)
    elif device.type == "cpu" and dtype == torch.bfloat16 and not library_packs(dtype):
        log.warning("layers in bfloat16 that are not compiled are slow on this CPU: set model.dtype=float32")
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    engine = Engine(
        model,
        tokenizer,
        pool,
        eos_ids,
        max_model_len,
        config.max_num_seqs,
        config.max_batched_tokens,
        tuple(checkpoint.adapters),
        overlap=config.overlap == "on" or (config.overlap == "auto" and device.type == "cuda"),
    )
    if records:
        recorder = CudaRecorder(device)
        engine.executor.record(recorder, engine.max_model_len, engine.scheduler.expected_steps, at_once=forced)
        engine.scheduler.bursts = Bursts(step_costs(model), engine.executor.graphs.replays)
    engine.scheduler.swap = make_swap(config.swap_space, model, pool)
    return engine


def step_costs(model: PagedModel) -> StepCosts:
    """Of decode steps that are replayed, beside those that are not."""
    return StepCosts.of(sum(x.nbytes for x in model.module.parameters()), active_parameters(model.module))


def use_scales(cache: AttentionBackend, checkpoint: Checkpoint, model: PagedModel) -> None:
    """Give pages of fp8 the scales that the checkpoint has. Raises ConfigError."""
    from batchrun.engine.attention.triton import Fp8Attention

    assert isinstance(cache, Fp8Attention)
    cache.use_scales(read_scales(checkpoint.folder, model.layers, checkpoint.text_config.num_hidden_layers))


def with_fixed(
    memory: DeviceMemory,
    model: PagedModel,
    paged: type[AttentionBackend],
    config: EngineConfig,
    max_model_len: int,
    *,
    records: bool,
) -> DeviceMemory:
    """The sum with what the engine holds on a GPU from its load, or from its first need, to its end."""
    memory = memory._replace(workspace=paged.workspace_bytes)
    if not runs_triton(model.device):
        return memory
    from batchrun.engine.token_counts import table_bytes

    rows = min(config.max_num_seqs, config.max_batched_tokens)
    memory = memory._replace(penalties=table_bytes(rows, model.vocab_size))
    from batchrun.engine.attention.triton import TritonAttention

    if not records or not issubclass(paged, TritonAttention):
        return memory
    from batchrun.engine.graphs import GraphShape, adapts, graph_bytes

    assert config.block_size is not None
    sms = torch.cuda.get_device_properties(model.device).multi_processor_count
    adapted = adapts(model.module)
    shape = GraphShape(rows, config.block_size, max_model_len, model.vocab_size, model.dtype, sms, adapted)
    buffers, recorded = graph_bytes(paged, model.layers, shape, memory.logits)
    return memory._replace(graph_buffers=buffers, graphs=recorded)
