from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxis.loading.gguf.container import read_gguf_metadata, shortest_float
from jaxis.loading.gguf_files import find_shards

# Key in the file -> key in generation_config.json, and its type.
SETTINGS = {
    "general.sampling.temp": ("temperature", float),
    "general.sampling.top_k": ("top_k", int),
    "general.sampling.top_p": ("top_p", float),
    "general.sampling.min_p": ("min_p", float),
    "general.sampling.penalty_repeat": ("repetition_penalty", float),
}


def gguf_generation_defaults(path: Path) -> dict[str, Any]:
    """Returns the sampling settings that a GGUF file recommends, if any, as keys of generation_config.json.

    Raises CheckpointError if the file cannot be read.
    """
    metadata = read_gguf_metadata(find_shards(path)[0])
    found = {name: metadata[key] for key, (name, kind) in SETTINGS.items() if type(metadata.get(key)) is kind}
    return {name: shortest_float(value) if type(value) is float else value for name, value in found.items()}
