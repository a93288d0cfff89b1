"""Decoders without their output heads, as checkpoints that make vectors have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig


def without_head(model_class: type[Any]) -> type[Any]:
    """The class of a decoder whose head is not loaded, and whose checkpoint may be that of the decoder alone.

    Args:
      model_class: A `CausalLM`.
    """

    class Headless(model_class):
        def is_tied(self, config: HFConfig, default: bool) -> bool:
            super().is_tied(config, default)  # reads the key
            return True

        def parameter_name(self, name_in_file: str) -> str:
            is_whole = name_in_file.startswith(("model.", "lm_head."))
            return super().parameter_name(name_in_file if is_whole else f"model.{name_in_file}")

        def without_redundant_tensors(
            self, weights: Iterable[tuple[str, np.ndarray]]
        ) -> Iterable[tuple[str, np.ndarray]]:
            kept = ((name, tensor) for name, tensor in weights if not name.startswith("lm_head."))
            return super().without_redundant_tensors(kept)

    Headless.__name__ = Headless.__qualname__ = model_class.__name__
    return Headless
