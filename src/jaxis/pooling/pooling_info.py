"""Facts about a model that makes vectors or scores, as its engine and a server know them. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxis.engine.client.engine_client import EngineInfo, EngineKind
from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.pooling.dimensions import Dimensions
from jaxis.pooling.inputs import InputReader
from jaxis.pooling.pooling_config import PoolingSettings
from jaxis.tokenizer import Tokenizer


@dataclass(frozen=True)
class PoolingInfo(EngineInfo):
    """Facts about an embedding model or classifier. `max_model_len` is the limit of an input's tokens.

    Attributes:
      settings: Pooling of hidden states.
      dimensions: Size of vectors, and sizes that they may be cut to; for a classifier, the number of labels.
      classifier: Meaning of the logits; None for an embedding model.
    """

    settings: PoolingSettings = field(default_factory=lambda: PoolingSettings("mean"))
    dimensions: Dimensions = field(default_factory=Dimensions)
    classifier: ClassifierSettings | None = None

    def reader(self, tokenizer: Tokenizer | None) -> InputReader:
        """Returns a reader of inputs."""
        template = None if self.classifier is None else self.classifier.template
        return InputReader(
            tokenizer, self.settings, max_tokens=self.max_model_len, vocab_size=self.vocab_size, template=template
        )


POOLING = EngineKind("jaxis.pooling.pooling_core", PoolingInfo)
