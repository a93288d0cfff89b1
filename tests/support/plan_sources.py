"""Published configurations to plan for, from config.json alone."""

import json

from jaxis.bringup.analyze.source import ModelSource
from tests.support.places import TESTS

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
"""Keys of Llama 3.1 that the model of 70 billion parameters has otherwise than that of 8."""


def published(name, **changes):
    """A model without weights, by the name of its file in tests/data/configs."""
    path = TESTS / "data" / "configs" / f"{name}.json"
    return ModelSource(name, str(path), json.loads(path.read_text()) | changes, None, "config.json alone")
