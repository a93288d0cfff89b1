"""The longest sequence that a checkpoint is for."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig


def trained_context_length(config: HFConfig) -> int:
    """In tokens: `max_position_embeddings`, or `model_max_length` of families whose attention has no positions.

    Args:
      config: Of the model, or of a multimodal one around it.

    Raises:
      ConfigError: It has neither.
    """
    text_config = config.get_text_config()
    length = text_config.get("max_position_embeddings", text_config.get("model_max_length"))
    return text_config["max_position_embeddings"] if length is None else length
