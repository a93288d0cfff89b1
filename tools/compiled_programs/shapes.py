"""Models whose weights are compiled in several widths, and the slices that hold them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHAPES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "qwen3-0.6b": {"bfloat16": ["v5e-1"], "int8": ["v5e-1"], "int4": ["v5e-1"]},
    "qwen3-8b": {"bfloat16": ["v6e-1"], "int8": ["v6e-1"], "int4": ["v5e-1", "v6e-1"]},
    "mixtral-8x7b": {"bfloat16": ["v6e-4", "v6e-8"], "int8": ["v5e-4", "v6e-8"], "int4": ["v6e-1", "v6e-8"]},
    "gpt-oss-120b": {
        "bfloat16": ["v6e-8"],
        "int8": ["v6e-8"],
        "int4": ["v6e-4", "v6e-8"],
        "stored": ["v6e-4", "v6e-8"],
    },
    "deepseek-v3": {"bfloat16": ["v6e-64"], "int8": ["v5e-64", "v6e-32"], "int4": ["v6e-16"], "stored": ["v5e-64"]},
}
"""Name of a config -> width of the weights -> targets whose memory holds all layers, by `jaxis plan`."""
