"""Which model families are refused from their config alone, before a weight is read, and why.

Every other family is let through to the check at load (acceptance.py), which decides by the numbers. What is
refused here would fail that check for a reason that it cannot name, or would pass it on short prompts only.
"""

from __future__ import annotations

from typing import Any

from batchrun.errors import ConfigError


class UnsupportedModel(ConfigError):
    """A model that our attention cannot serve; the message says why."""


STATE = "its layers keep a recurrent state instead of keys and values"
OWN_CODE = "its attention is code of its own that no other can replace"
POSITION_BIAS = "its attention adds a position bias to the scores, in code of its own"
ENCODER = "it is an encoder, whose tokens see the tokens after them"
INDEXED = "some of its layers choose which keys to see by a learned index"
CHUNKED = "some of its layers attend inside fixed chunks of positions, and others scale queries by their position"

# By `model_type`. Families whose config names a layer type of REFUSED_LAYERS need no entry.
REFUSED_FAMILIES: dict[str, str] = {
    "bloom": POSITION_BIAS,
    "falcon": OWN_CODE,
    "mpt": POSITION_BIAS,
    "doge": "its attention needs a mask that depends on the data",
    "git": OWN_CODE,
    "gpt_neo": OWN_CODE,
    "gpt_neox_japanese": OWN_CODE,
    "openai-gpt": OWN_CODE,
    "xglm": OWN_CODE,
    "xlm": OWN_CODE,
    "xlnet": OWN_CODE,
    "cpmant": POSITION_BIAS,
    "reformer": OWN_CODE,
    "trocr": "it is the decoder of an encoder-decoder, which reads an image",
    "mllama": "some of its layers attend to an image, and are left out where there is none",
    "blt": "it works on bytes in patches of changing length",
    "falcon_mamba": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "rwkv": STATE,
    "xlstm": STATE,
    "recurrent_gemma": STATE,
    "llama4": CHUNKED,
    "llama4_text": CHUNKED,
    "deepseek_v4": INDEXED,
} | dict.fromkeys(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *(
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
    ),
    ENCODER,
)

# By an entry of `layer_types`.
REFUSED_LAYERS: dict[str, str] = {
    "linear_attention": "some of its layers keep a recurrent state instead of keys and values",
    "conv": "some of its layers are convolutions, which keep a state instead of keys and values",
    "hybrid": "its layers mix attention with a recurrent state",
    "hybrid_sliding": "its layers mix attention with a recurrent state",
    "chunked_attention": "some of its layers attend inside fixed chunks of positions",
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,
    "compressed_sparse_attention": "some of its layers see keys that are pooled over several positions",
    "heavily_compressed_attention": "some of its layers see keys that are pooled over several positions",
}
# Encoder-decoders whose encoder may be saved alone, with a config that does not tell.
ENCODER_PARTS = {"t5", "mt5", "umt5"}
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}


def check_config(config: Any, purpose: str = "generate") -> None:
    """Raise UnsupportedModel, with the family and the reason, for a transformers config that cannot work.

    `purpose` is what the model is loaded for: generate (any use of the next token), embed or rank.
    """
    if purpose != "generate":
        encoder_class(config, purpose)
    elif reason := refusal(config):
        raise UnsupportedModel(f"{config.model_type} cannot run here: {reason}{_remedy(config)}")


def refusal(config: Any) -> str | None:
    """Why a transformers config cannot work, as a clause without a full stop; None if nothing speaks against it."""
    text = config.get_text_config(decoder=True)
    if is_classifier(config):
        return "its files hold a classification head in place of the one that predicts tokens"
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return "it is an encoder-decoder, and batchrun runs decoder-only models"
    for part in (config, text):
        if part.model_type in REFUSED_FAMILIES:
            return REFUSED_FAMILIES[part.model_type]
    kinds = [kind for kind in getattr(text, "layer_types", None) or [] if kind not in PLAIN_LAYERS]
    if kinds:
        return REFUSED_LAYERS.get(kinds[0], f"it has layers of the kind {kinds[0]!r}")
    return None if _has_class(config) else "transformers has no text generation model for this config"


def is_vision_language(config: Any) -> bool:
    """Whether transformers offers the language model of this config only as a part of one that also takes images."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _has_class(config: Any) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    own_code = bool(getattr(config, "auto_map", None))
    return own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_vision_language(config)


def is_classifier(config: Any) -> bool:
    """Whether the checkpoint was saved with a sequence classification head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def is_encoder(config: Any) -> bool:
    """Whether tokens see the tokens after them, as far as the config tells."""
    if own_code := getattr(config, "auto_map", None):
        return "AutoModelForCausalLM" not in own_code
    text = config.get_text_config(decoder=True)
    return REFUSED_FAMILIES.get(text.model_type) == ENCODER or not _has_class(config)


def _remedy(config: Any) -> str:
    if is_classifier(config):
        return "; task=rank gives its scores"
    return "; task=embed makes embeddings of texts with it" if is_encoder(config) and _embeds(config) else ""


def _embeds(config: Any) -> bool:
    try:
        encoder_class(config, "embed")
    except UnsupportedModel:
        return False
    return True


def encoder_class(config: Any, purpose: str) -> Any:
    """The transformers class that loads the model without a cache: its hidden states for embed, its scores for rank.

    Raises UnsupportedModel, with the family and the reason, where there is none.
    """
    import transformers

    own_code = bool(getattr(config, "auto_map", None))
    if purpose == "rank":
        auto_class, mapping = (
            transformers.AutoModelForSequenceClassification,
            transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        )
        if config.is_encoder_decoder:
            raise _unfit(config, "it is an encoder-decoder, and batchrun scores with encoders and decoders")
        if not is_classifier(config) and not own_code:
            raise _unfit(
                config, f"its files are of {' and '.join(config.architectures or ['no class'])}, without a "
                "classification head",
            )  # fmt: skip
    elif config.is_encoder_decoder or config.model_type in ENCODER_PARTS:
        auto_class, mapping = transformers.AutoModelForTextEncoding, transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    else:
        auto_class, mapping = transformers.AutoModel, transformers.MODEL_MAPPING
    if own_code:
        return auto_class
    if type(config) not in mapping:
        kind = "an encoder of its own" if config.is_encoder_decoder else f"a model for task={purpose}"
        raise _unfit(config, f"transformers has not {kind} for this config")
    takes_more = not is_vision_language(config) and any(hasattr(config, f"{x}_config") for x in ("vision", "audio"))
    if takes_more or mapping[type(config)].main_input_name != "input_ids":
        raise _unfit(config, "it needs more than text")
    return auto_class


def _unfit(config: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{config.model_type} cannot run here: {reason}")
