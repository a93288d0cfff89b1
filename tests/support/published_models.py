"""The published models whose config.json is in tests/data/configs: where each was found, and what its makers say of it.

The files have the keys and values of the originals; a copy that a tool quantized is without its `quantization_config`.
A new file gets an entry in tests/data/published_models.yaml, in alphabetical order, and then
`python -m tools.supported_models` writes docs/models.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"

UNKNOWN = "counted in a way that its makers do not say"


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
      model: Its id on the Hub.
      source: Public place of a copy of its config.json; None where none was found again, so that nothing proves the
        values.
      parameters: In billions, as its card, its report or its name says; without encoders of images and audio, and
        without layers for multi-token prediction.
      active: (Those active for a token in billions, "with embeddings", "without", "without head" either, or UNKNOWN);
        None where all are.
      cache_bytes: Bytes of a token in bfloat16: 2 (keys, values) x layers x heads x size x 2, or layers x latent x 2.
      unproved: Keys that `source` does not prove.
      is_cut: True if `parameters` is cut to whole billions instead of rounded.
    """

    model: str
    source: str | None
    parameters: float
    active: tuple[float, str] | None
    cache_bytes: int
    unproved: str = ""
    is_cut: bool = False


def read(name: str) -> dict[str, Any]:
    """The config.json of a file in tests/data/configs."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def _published(model: str, parameters: float, cache: list[int] | int, **more: Any) -> Published:
    active = more.pop("active", None)
    return Published(
        model,
        more.pop("source", None),
        parameters,
        None if active is None else tuple(active),
        math.prod(cache) if isinstance(cache, list) else cache,
        **more,
    )


_ROWS = yaml.safe_load((TESTS / "data" / "published_models.yaml").read_text())
PUBLISHED = {name: _published(**row) for name, row in _ROWS.items()}
LACKING = {"num_hash_layers": 3, "o_groups": 8}


def unsupported() -> dict[str, Any]:
    """The config.json of a model of no family here, which is closest to DeepSeek V3.2, without keys of `LACKING`."""
    return read("deepseek-v3.2") | LACKING | {"architectures": ["DeepseekV9ForCausalLM"], "model_type": "deepseek_v9"}
