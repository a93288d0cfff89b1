"""The model that `jaxis verify` checks: a checkpoint with weights, or a config.json alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxis.config.mistral_params import is_mistral_format
from jaxis.config.quantization_files import CONFIG, read_config, with_quantization
from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object
from jaxis.loading.hub import resolve_model
from jaxis.loading.hub_headers import download_config

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A model to verify: its config.json, and the checkpoint's folder if it has weights."""

    config: dict[str, Any]
    folder: Path | None


def find_source(model: str, *, revision: str | None = None) -> Source:
    """Finds a folder, a config.json, or a Hub id, whose weights are used only if they are already cached.

    Raises CheckpointError if there is no such model.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} is a GGUF file, whose weights transformers does not read as they are: convert it"
        )
    if path.is_file():
        config = read_json_object(path)
        return Source(with_quantization(config, path.parent) if path.name == CONFIG else config, None)
    try:
        folder = resolve_model(model, revision=revision, local_files_only=None if path.is_dir() else True)
    except CheckpointError:
        if path.is_dir() or not _HUB_ID.fullmatch(model):
            raise
        return Source(read_config(download_config(model, revision=revision).parent), None)
    if is_mistral_format(folder):
        raise CheckpointError(
            f"{folder} is in Mistral's own format, which transformers does not read: verify a checkpoint in Hugging "
            "Face's format"
        )
    config = read_config(folder)
    has_weights = any(folder.glob("*.safetensors"))
    return Source(config, folder if has_weights else None)
