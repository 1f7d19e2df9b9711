"""A transformers model without KV cache, whose hidden states become one vector a text."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.linear import PackedLinear, is_plain
from batchrun.engine.model import float_type, load_module
from batchrun.engine.pooler import EmbeddingPooler, Pooler, ScorePooler
from batchrun.engine.pooling import Embed
from batchrun.engine.precision import float32_products, keep_angles_exact
from batchrun.engine.support import UnsupportedModel, encoder_class
from batchrun_kernels.precision import IEEE, TF32

log = logging.getLogger(__name__)

PROBE_LENGTHS = (5, 11)  # tokens of the two texts that a model is tried with
# Most that a vector may differ, relative to its length, when it shares a batch or its weights are packed.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


class EncoderModel:
    """`forward` gives a vector for each text of a padded batch."""

    def __init__(self, module: Any, pooler: Pooler, pad_id: int | None, allow_pickle: bool = False) -> None:
        self.module: Any = module.eval().requires_grad_(False)
        self.pooler = pooler
        for config in (module.config, module.config.get_text_config(decoder=True)):
            config.use_cache = False
        self.device, self.dtype = next(module.parameters()).device, float_type(module)
        self._precision = IEEE  # of products of float32
        self.vocab_size: int = module.get_input_embeddings().weight.shape[0]
        self.pad_id = pad_id  # None: whatever a batch does not hold
        self._takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
        usual = np.setdiff1d(np.arange(self.vocab_size), _special_ids(module.config))
        random = np.random.default_rng(0)
        self._probes = [random.choice(usual, length) for length in PROBE_LENGTHS]
        self._embed = None
        if isinstance(pooler, EmbeddingPooler):
            self._embed = Embed(pooler, allow_pickle).to(self.device).eval().requires_grad_(False)

    def allow_tf32(self) -> None:
        """From now on let products of float32 be TF32's, but for those that make rotary angles."""
        keep_angles_exact(self.module, self.device)
        self._precision = TF32

    @torch.inference_mode()
    def forward(self, rows: Sequence[np.ndarray], type_ids: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """float32 [B, pooler.size] of B texts, int64 [n] token ids each; `type_ids` tell the parts of a pair apart."""
        pad = _free_id(rows) if self.pad_id is None else self.pad_id
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        inputs = {"input_ids": self._padded(rows, pad)}
        places = torch.arange(inputs["input_ids"].shape[1], device=self.device)
        inputs["attention_mask"] = (places < lengths[:, None]).long()
        if type_ids is not None and self._takes_types:
            inputs["token_type_ids"] = self._padded(type_ids, 0)
        if self._embed is not None:
            vectors: torch.Tensor = self._embed(self._hidden(inputs), lengths)
        else:
            vectors = self._scores(inputs, pad)
        found: np.ndarray = vectors.cpu().numpy()
        return found

    def _padded(self, rows: Sequence[np.ndarray], pad: int) -> torch.Tensor:
        """int64 [B, L] of rows of up to L numbers."""
        padded = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(padded).to(self.device)

    def _hidden(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = getattr(self._run(inputs), "last_hidden_state", None)
        if hidden is None:
            raise UnsupportedModel(f"{self.module.config.model_type}: it has no last hidden state to pool")
        found: torch.Tensor = hidden
        return found

    def _run(self, inputs: dict[str, torch.Tensor]) -> Any:
        with float32_products(self._precision, self.device):
            return self.module(**inputs)

    def _scores(self, inputs: dict[str, torch.Tensor], pad: int) -> torch.Tensor:
        assert isinstance(self.pooler, ScorePooler)
        # Decoders score the last token that is no padding, which they tell by its id.
        self.module.config.get_text_config(decoder=True).pad_token_id = pad
        logits: torch.Tensor = self._run(inputs).logits.float()
        if self.pooler.activation == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1) if self.pooler.activation == "softmax" else logits

    def pack(self) -> None:
        """Lay the weights out for the CPU's matrix products, if the vectors stay the same."""
        before = self.probe()
        kept = _pack_linears(self.module)
        try:
            same = _difference(before, self.probe()) <= TOLERANCE[self.dtype]
        except (AttributeError, RuntimeError, TypeError):  # code that looks into its linear layers
            same = False
        if not same:
            for parent, name, linear in kept:
                setattr(parent, name, linear)
            log.info("%s: its weights stay as they are stored", self.module.config.model_type)

    def check(self) -> None:
        """Raise UnsupportedModel unless a text's vector is the same alone and beside a longer one."""
        family = self.module.config.model_type
        alone, together = self.probe(), self.probe(together=True)
        if alone.shape[1] != self.pooler.size:
            raise UnsupportedModel(
                f"{family}: its vectors have {alone.shape[1]} numbers, and its config says {self.pooler.size}"
            )
        difference = _difference(alone, together)
        if not difference <= TOLERANCE[self.dtype]:
            raise UnsupportedModel(
                f"{family}: the vector of a text changes by {difference:.2g} of its length when a longer text is in "
                "its batch"
            )

    def probe(self, together: bool = False) -> np.ndarray:
        """Vectors [2, size] of two texts of random tokens, in a batch each or in one."""
        rows = self._probes
        return self.forward(rows) if together else np.concatenate([self.forward([row]) for row in rows])


def load_encoder_model(
    checkpoint: Checkpoint, pooler: Pooler, device: torch.device, dtype: torch.dtype, pack: bool
) -> EncoderModel:
    """Load the weights, and try the model. Raises what `load_module` does, and UnsupportedModel."""
    purpose = "embed" if isinstance(pooler, EmbeddingPooler) else "rank"
    # A pooler is a layer on the first token, trained for other aims; checkpoints often come without it.
    module = load_module(checkpoint, encoder_class(checkpoint.config, purpose), device, dtype, unused=("pooler.",))
    pad_id = module.config.get_text_config(decoder=True).pad_token_id
    model = EncoderModel(module, pooler, pad_id, checkpoint.model.allow_pickle)
    model.check()
    if pack and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        model.pack()
    return model


def _pack_linears(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Replace every plain linear layer; returns (parent, name, layer) of each."""
    found: list[tuple[torch.nn.Module, str, torch.nn.Module]] = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and is_plain(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear([child]))
    return found


def _special_ids(config: Any) -> list[int]:
    """Tokens with a meaning of their own, which random texts must not hold."""
    config = config.get_text_config(decoder=True)
    found: list[int] = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id"):
        value = getattr(config, name, None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _free_id(rows: Sequence[np.ndarray]) -> int:
    """The smallest token id that no row holds."""
    used = np.unique(np.concatenate(rows))
    return int(np.setdiff1d(np.arange(len(used) + 1), used)[0])


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """The most that a row differs from its equal, relative to the longest row."""
    return float(np.linalg.norm(one - other, axis=1).max() / max(np.linalg.norm(one, axis=1).max(), 1e-30))
