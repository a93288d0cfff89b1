"""Classifiers on encoders: a head on the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.pooling.classifier_settings import num_labels
from jaxis.pooling.pooling_config import Mode
from jaxis.pooling.score_head import ScoreHead

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


def with_first_token_head(model_class: type[Any]) -> type[Any]:
    """Makes the class of an encoder with a classifier's head on the first token."""

    class Classifying(model_class):
        def __init__(
            self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None
        ) -> None:
            super().__init__(vllm_config, rng, quant_config)
            scope = LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names)
            self.score = ScoreHead(scope / "score", num_labels(scope.config))

        @classmethod
        def classifier_mode(cls, config: HFConfig) -> Mode:
            """Returns the pooling mode of the head's input."""
            del config
            return "cls"

    Classifying.__name__ = Classifying.__qualname__ = model_class.__name__
    return Classifying
