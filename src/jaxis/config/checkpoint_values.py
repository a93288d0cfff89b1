"""What a config.json says in more than one way: its data type, its longest sequence, keys with several names."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import reference_of

# Keys that config.json files have under several names.


def value_of_either(config: HFConfig, *names: str) -> Any:
    """The value of a key that has several names, of which config.json may have one or, with the same value, several.

    Args:
      config: Of the model.
      names: The key's; an error about a missing key names the first.

    Raises:
      ConfigError: None of them is there, or two have different values.
    """
    value = config[next((name for name in names if name in config), names[0])]
    for name in names:
        if config.get(name) is not None:
            config.expect(name, value)
    return value


# The longest sequence that a checkpoint is for.


DEFAULT_CONTEXT_LENGTH = 2048
"""In tokens, of models that are for any length, as in vLLM."""


ALWAYS_WITH_ALIBI = ("bloom",)
"""Model types whose config.json need not say that scores have ALiBi's biases, nor for how many tokens the model is."""


def trained_context_length(config: HFConfig) -> int | None:
    """In tokens: `max_position_embeddings`, or `model_max_length` of families whose attention has no positions.

    Where config.json has neither, what the reference assumes for `max_position_embeddings`. None of a model without
    attention, or with ALiBi, whose config.json has neither: its layers know no positions.

    Args:
      config: Of the model, or of a multimodal one around it.

    Raises:
      ConfigError: It has neither, and attention.
    """
    text_config = config.get_text_config()
    length = text_config.get("max_position_embeddings", text_config.get("model_max_length"))
    model_type = text_config.get("model_type")
    if length is None and (reference := reference_of(model_type)) is not None:
        length = reference.defaults.get("max_position_embeddings")
    if length is None and "num_attention_heads" in text_config and model_type not in ALWAYS_WITH_ALIBI:
        return text_config["max_position_embeddings"]
    return length


# The data type that a config.json gives its weights, in any spelling in use.


_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def checkpoint_dtype(config: HFConfig) -> str | None:
    """The name of the type, such as "bfloat16"; None if config.json has none. The text part's goes first."""
    for part in (config.get_text_config(), config):
        if dtype := part.get("dtype", part.get("torch_dtype")):
            name = str(dtype).removeprefix("torch.").lower()
            return None if name == "auto" else _SPELLINGS.get(name, name)
    return None
