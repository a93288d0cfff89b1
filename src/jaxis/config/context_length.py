"""The longest sequence that a checkpoint is for."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig

DEFAULT_CONTEXT_LENGTH = 2048
"""In tokens, of models that are for any length, as in vLLM."""


def trained_context_length(config: HFConfig) -> int | None:
    """In tokens: `max_position_embeddings`, or `model_max_length` of families whose attention has no positions.

    None of a model without attention whose config.json has neither: recurrent layers know no positions.

    Args:
      config: Of the model, or of a multimodal one around it.

    Raises:
      ConfigError: It has neither, and attention.
    """
    text_config = config.get_text_config()
    length = text_config.get("max_position_embeddings", text_config.get("model_max_length"))
    if length is None and "num_attention_heads" in text_config:
        return text_config["max_position_embeddings"]
    return length
