"""What the files of a model, and the settings, come to for embeddings and scores; known before a weight is read."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from batchrun.config import EmbedConfig, RankConfig
from batchrun.engine.checkpoint import Checkpoint, position_limit
from batchrun.engine.pooler import EmbeddingPooler, ScorePooler
from batchrun.engine.sentence_transformers import SentenceTransformer, read_sentence_transformer
from batchrun.engine.support import UnsupportedModel, is_encoder
from batchrun.errors import ConfigError

log = logging.getLogger(__name__)

NO_LIMIT = 10**9  # tokenizers that know no limit say a number above this
# Their first position is the one after the padding token's id, so that fewer tokens fit than there are positions.
SHIFTED_POSITIONS = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # by the name of the torch module


class TextForm(NamedTuple):
    """How the model wants a text before it is tokenised."""

    prompt: str = ""  # put before it
    lower_case: bool = False


def embedding(checkpoint: Checkpoint, tokenizer: Any, config: EmbedConfig) -> tuple[EmbeddingPooler, TextForm]:
    """How the model's files and the settings want texts embedded.

    Raises ConfigError for a prompt or a number of dimensions that the model does not have, and what
    `read_sentence_transformer` raises.
    """
    known = read_sentence_transformer(checkpoint.folder, config.pooling)
    _check_settings(checkpoint)
    if known is None:
        usual = "mean" if is_encoder(checkpoint.config) else "last"
        said = SentenceTransformer(usual if config.pooling == "auto" else config.pooling, normalize=True)
        if config.pooling == "auto":
            log.warning("%s does not say how to pool: taking %s (embed.pooling)", checkpoint.name, usual)
    else:
        said = known
    size = said.size or int(checkpoint.text_config.hidden_size)
    if config.dimensions is not None and config.dimensions > size:
        raise ConfigError(f"embed.dimensions={config.dimensions} is more than the {size} that the model has")
    prompt = _prompt(said, config.prompt)
    pooler = EmbeddingPooler(
        pooling=said.pooling,
        size=config.dimensions or size,
        normalize=said.normalize if config.normalize is None else config.normalize,
        max_length=_longest(checkpoint, tokenizer, said.max_length),
        dense=tuple(said.dense),
        skip=0 if said.pools_prompt or not prompt else _prompt_tokens(tokenizer, prompt),
    )
    return pooler, TextForm(prompt, said.lower_case)


def scores(checkpoint: Checkpoint, tokenizer: Any, config: RankConfig) -> ScorePooler:
    """How the model's config and the settings want texts scored. Raises UnsupportedModel, ConfigError."""
    _check_settings(checkpoint)
    labels = checkpoint.config.id2label
    names = tuple(str(labels[number]) for number in sorted(labels))
    if len(set(names)) < len(names):
        raise UnsupportedModel(f"{checkpoint.folder}: its labels {', '.join(names)} are not told apart by their names")
    activation = _activation(checkpoint.config, len(names)) if config.activation == "auto" else config.activation
    return ScorePooler(names, activation, _longest(checkpoint, tokenizer, None))


def _check_settings(checkpoint: Checkpoint) -> None:
    if checkpoint.model.quantization != "none":
        raise ConfigError(
            f"model.quantization={checkpoint.model.quantization} is for models that generate: set it to none"
        )


def _activation(config: Any, labels: int) -> str:
    """As sentence-transformers' CrossEncoder noted it in the config, else by the kind of problem."""
    noted = getattr(config, "sentence_transformers", None) or {}
    noted = noted.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if noted:
        name = str(noted).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{config.model_type}: its activation {name} is not one of {', '.join(ACTIVATIONS)}: choose one with "
                "rank.activation"
            )
        return ACTIVATIONS[name]
    if config.problem_type is not None:
        return {"regression": "none", "single_label_classification": "softmax"}.get(config.problem_type, "sigmoid")
    if labels > 1:
        return "softmax"
    # One number: of a cross-encoder, how well a text fits a query; of a decoder, a reward, which has no bounds.
    return "sigmoid" if is_encoder(config) else "none"


def _longest(checkpoint: Checkpoint, tokenizer: Any, max_length: int | None) -> int:
    """Tokens of the longest text: as set, else as the files say, and never more than there are positions."""
    positions = position_limit(checkpoint.text_config)
    if positions is not None and checkpoint.text_config.model_type in SHIFTED_POSITIONS:
        positions -= (checkpoint.text_config.pad_token_id or 0) + 1
    asked = checkpoint.model.max_model_len
    if asked is not None and positions is not None and asked > positions:
        raise ConfigError(f"model.max_model_len={asked} is more than the {positions} positions of the model")
    told = max_length or (tokenizer.model_max_length if tokenizer.model_max_length < NO_LIMIT else None)
    limits = [limit for limit in (asked or told, positions) if limit is not None]
    if not limits:
        raise ConfigError(f"{checkpoint.folder} does not say how long its texts may be: set model.max_model_len")
    return int(min(limits))


def _prompt(said: SentenceTransformer, name: str | None) -> str:
    name = said.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in said.prompts:
        known = f"there are {', '.join(said.prompts)}" if said.prompts else "its files have none"
        raise ConfigError(f"embed.prompt={name} is no prompt of the model: {known}")
    return said.prompts[name]


def _prompt_tokens(tokenizer: Any, prompt: str) -> int:
    """Tokens of the prompt and of what the tokenizer puts before it."""
    ids = tokenizer(prompt)["input_ids"]
    while ids and ids[-1] in tokenizer.all_special_ids:
        ids.pop()
    return len(ids)
