"""Checkpoints of a model without its head, such as `MistralModel` or `Qwen3Model` in `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError

# A name that has both is the multimodal model's, such as Gemma3Model; that of the text ends in TextModel.
_ENDS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel")
_PARTS = ("model.", "lm_head.", "score.")
# Prefixes that the reference gives the inner model in models with a head.
_TEXT_PREFIXES = ("language_model.", "text_model.")  # of the text model within a multimodal one
_PREFIXES = ("transformer.", "backbone.", "gpt_neox.", "model.decoder.")


def names_with_head(architecture: str) -> list[str]:
    """Returns the possible `architectures` entries of the model with a head; none if the name has one."""
    stem = architecture.removesuffix("Model")
    if stem in ("", architecture) or architecture.endswith(_ENDS):
        return []
    stems = dict.fromkeys((stem, stem.removesuffix("Text")))
    return [name + end for name in stems for end in (_ENDS if name == stem else ("ForCausalLM",))]


def name_with_prefix(parameter_name: Callable[[str], str], name_in_file: str) -> str:
    """Returns a parameter's name for a tensor of a checkpoint with or without a head.

    `parameter_name` maps tensor names of checkpoints with a head to parameter names.
    """
    name = parameter_name(name_in_file)
    if name.startswith(_PARTS):
        return name
    for prefix in _TEXT_PREFIXES:
        if name_in_file.startswith(prefix):
            return parameter_name(f"model.{name_in_file.removeprefix(prefix)}")
    for prefix in _PREFIXES:
        found = parameter_name(prefix + name_in_file)
        if found.startswith("model.") and not found.startswith(prefix):
            return found
    return parameter_name(f"model.{name_in_file}")


def of_base_model(model_class: type[Any], architecture: str) -> type[Any]:
    """Returns a subclass of a `CausalLM` that loads checkpoints without a head, with this entry of `architectures`."""

    class WithoutHead(model_class):
        def parameter_name(self, name_in_file: str) -> str:
            return name_with_prefix(super().parameter_name, name_in_file)

        def is_tied(self, config: HFConfig, default: bool) -> bool:
            self._source = config.source
            return super().is_tied(config, default)

        def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
            loaded = super().load_weights(weights)
            if self.lm_head is not None and not any(name.startswith("lm_head.") for name in loaded):
                raise CheckpointError(
                    f"{self._source} has the architecture {architecture}, a model without the head that predicts "
                    f"tokens: use it for vectors (runner='pooling'), or a checkpoint of {model_class.__name__}"
                )
            return loaded

    WithoutHead.__name__ = WithoutHead.__qualname__ = model_class.__name__
    return WithoutHead
