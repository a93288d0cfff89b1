"""Recognition of checkpoints that were made for vectors or scores. Imports no JAX."""

from __future__ import annotations

from pathlib import Path

from jaxis.config.architecture import architectures_of
from jaxis.config.hf_config import HFConfig
from jaxis.loading.gguf_config_keys import POOLING_MODE
from jaxis.pooling.classifier_settings import is_classifier
from jaxis.pooling.encoders import is_encoder
from jaxis.pooling.pooling_config import has_pooling_files


def is_made_for_pooling(path: Path, config: HFConfig) -> bool:
    """Returns whether a checkpoint, given by its path and config.json, was made for vectors or scores."""
    names = architectures_of(config)
    says_pooling = has_pooling_files(path) or config.get(POOLING_MODE) is not None
    return says_pooling or is_encoder(names) or is_classifier(names, path)
