"""Values that config.json files give in several ways: the data type, the longest sequence, keys with several names."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import reference_of


def value_of_either(config: HFConfig, *names: str) -> Any:
    """Returns the value of a key with several names; config.json may have several if their values are equal.

    Raises ConfigError if none of them is there (the error names the first), or two have different values.
    """
    value = config[next((name for name in names if name in config), names[0])]
    for name in names:
        if config.get(name) is not None:
            config.expect(name, value)
    return value


DEFAULT_CONTEXT_LENGTH = 2048
"""Context length, in tokens, of models without a limit, as in vLLM."""


ALWAYS_WITH_ALIBI = ("bloom",)
"""Model types with ALiBi's biases, and without a context length, even if config.json does not say so."""


def trained_context_length(config: HFConfig) -> int | None:
    """Returns the context length of training, in tokens.

    This is `max_position_embeddings`, or `model_max_length` of families whose attention has no positions. If
    config.json has neither, it is the reference's default of `max_position_embeddings`. None for a model without
    attention, or with ALiBi, whose config.json has neither: its layers use no positions. Raises ConfigError if the
    config has neither, and the model has attention.
    """
    text_config = config.get_text_config()
    length = text_config.get("max_position_embeddings", text_config.get("model_max_length"))
    model_type = text_config.get("model_type")
    if length is None and (reference := reference_of(model_type)) is not None:
        length = reference.defaults.get("max_position_embeddings")
    if length is None and "num_attention_heads" in text_config and model_type not in ALWAYS_WITH_ALIBI:
        return text_config["max_position_embeddings"]
    return length


_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def checkpoint_dtype(config: HFConfig) -> str | None:
    """Returns the data type, such as "bfloat16", in any spelling; None without one. The text part's goes first."""
    for part in (config.get_text_config(), config):
        if dtype := part.get("dtype", part.get("torch_dtype")):
            name = str(dtype).removeprefix("torch.").lower()
            return None if name == "auto" else _SPELLINGS.get(name, name)
    return None
