"""Checkpoints of the model without its head, as `MistralModel` and `Qwen3Model` are in `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError

_ENDS = ("ForCausalLM", "LMHeadModel")
_PARTS = ("model.", "lm_head.", "score.")
# What the reference calls the model within a model with a head.
_PREFIXES = ("transformer.", "backbone.", "gpt_neox.", "model.decoder.")


def names_with_head(architecture: str) -> list[str]:
    """What `architectures` may call the models with a head on a model; none, if the name is of no model without one."""
    stem = architecture.removesuffix("Model")
    is_base = stem not in ("", architecture) and not architecture.endswith(_ENDS)
    return [stem + end for end in _ENDS] if is_base else []


def name_with_prefix(parameter_name: Callable[[str], str], name_in_file: str) -> str:
    """A parameter's name, whether the checkpoint is of a model with a head or without.

    Args:
      parameter_name: From a name in the file of a model with a head.
      name_in_file: The tensor's.
    """
    name = parameter_name(name_in_file)
    if name.startswith(_PARTS):
        return name
    for prefix in _PREFIXES:
        if (found := parameter_name(prefix + name_in_file)).startswith("model.") and found != prefix + name_in_file:
            return found
    return parameter_name(f"model.{name_in_file}")


def of_base_model(model_class: type[Any], architecture: str) -> type[Any]:
    """The class of a decoder whose checkpoint is that of a model without a head.

    Args:
      model_class: A `CausalLM`.
      architecture: What the checkpoint calls itself.
    """

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
