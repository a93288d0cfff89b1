"""Classifiers on encoders: a head on the first token."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.pooling.classifier_settings import num_labels
from jaxis.pooling.pooling_config import Mode
from jaxis.pooling.score_head import ScoreHead


def with_first_token_head(model_class: type[Any]) -> type[Any]:
    """Makes the class of an encoder with a classifier's head on the first token."""

    class Classifying(model_class):
        def add_parts(self, scope: LayerScope) -> None:
            super().add_parts(scope)
            self.score = ScoreHead(scope / "score", num_labels(scope.config))

        @classmethod
        def classifier_mode(cls, config: HFConfig) -> Mode:
            """Returns the pooling mode of the head's input."""
            del config
            return "cls"

    Classifying.__name__ = Classifying.__qualname__ = model_class.__name__
    return Classifying
