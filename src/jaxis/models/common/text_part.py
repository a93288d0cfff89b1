"""The text part of multimodal checkpoints, served alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from flax import nnx

from jaxis.config.architecture import check_model_type
from jaxis.errors import ConfigError
from jaxis.layers.module import JaxModule
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.models.common.interfaces import LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


class TextPart(JaxModule, LoadableWithIterator):
    """The `language_model` of a checkpoint; its other parts are not loaded, and prompts are text only.

    A family names its text model and the parts left out; any other tensor or config key is an error, as usual.

    Attributes:
      language_model_class: The text model; its config is `text_config`.
      other_parts: The checkpoint's modules that are not loaded.
      other_keys: Keys of config.json that concern those modules.
    """

    language_model_class: ClassVar[type[CausalLM]]
    other_parts: ClassVar[tuple[str, ...]]
    other_keys: ClassVar[tuple[str, ...]]

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        model_config = vllm_config.model_config
        config = model_config.hf_config
        text_config = config["text_config"]
        check_model_type(text_config, self.language_model_class.__name__)
        for key in self.other_keys:
            config.ignore(key, because="it is about a part that is not loaded")
        is_tied = text_config.get("tie_word_embeddings", False)
        if config.get("tie_word_embeddings", is_tied) != is_tied:
            raise ConfigError(
                f"{config.source} and its text_config have different tie_word_embeddings: correct the file"
            )
        text_model_config = dataclasses.replace(model_config, hf_config=text_config)
        self.language_model = self.language_model_class(
            dataclasses.replace(vllm_config, model_config=text_model_config),
            rng,
            quant_config,
            prefix="language_model",
        )

    @property
    def model(self) -> DecoderModel:
        """The text decoder below the head."""
        return self.language_model.model

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[jax.Array] | None, jax.Array, list[jax.Array]]:
        """See `CausalLM.__call__`."""
        return self.language_model(*args, **kwargs)

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """hidden_states [T, E] -> float32 logits [T, V]."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the text model; tensors of `other_parts` are skipped."""
        prefixes = tuple(f"{part}." for part in self.other_parts)
        return super().load_weights((name, tensor) for name, tensor in weights if not name.startswith(prefixes))
