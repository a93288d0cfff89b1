"""A model written as a packed folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxis.bringup.convert.from_gguf import write_settings
from jaxis.config.quantization_files import QUANTIZATION_FILES
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import OpenedModel, open_model
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.image_encoder.encoder_memory import EncoderMemory, make_memory
from jaxis.kernels import native
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint_files import check_destination, copy_other_files, new_folder
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.packed_name import is_packed
from jaxis.packed.write import write_packed
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import read_tokenizer

# Keys of config.json that say how the checkpoint's own tensors are quantized.
_OF_TENSORS = ("quantization_config", "quantization", "jaxis_quantization")


def pack_model(args: EngineArgs, destination: Path, progress: ProgressDisplay) -> int:
    """Writes a model as a packed folder, which appears when it is complete; returns the bytes of its weights.

    Raises:
      ConfigError, CheckpointError, EngineError: The errors of `LLM`; the destination exists or cannot be written; or
        there are no native kernels here.
    """
    check_destination(destination, "folder")
    opened = open_model(args)
    meshes = opened.make_meshes(args)
    if is_packed(opened.path):
        raise CheckpointError(f"{opened.path} is packed already: copy it")
    if not native.usable():
        raise ConfigError(f"jaxis pack is for the native kernels on CPU: {native.status()}")
    loaded = opened.load(args, meshes, progress)
    config = loaded.vllm_config.model_config
    models = [*loaded.models, *_towers(args, opened, meshes)]
    with new_folder(destination) as partial:
        _write_other_files(opened.path, partial, config.hf_config.to_dict())
        named = {type(model).__name__: model for model in models}
        nbytes = write_packed(partial, named, np.dtype(config.dtype).name)
    return nbytes


def _towers(args: EngineArgs, opened: OpenedModel, meshes: Sequence[jax.sharding.Mesh]) -> list[JaxModule]:
    """Loads the vision tower, if the model runs with one; one in a file of its own stays there."""
    make_config = functools.partial(opened.make_config, meshes=meshes)
    memory = make_memory(args, opened.path, opened.hf_config, read_tokenizer(opened.path), make_config)
    return [memory.load(meshes[0])] if isinstance(memory, EncoderMemory) and opened.path.is_dir() else []


def _write_other_files(source: Path, folder: Path, config: Mapping[str, object]) -> None:
    if (file := gguf_file(source)) is not None:
        write_settings(file, folder, Tokenizer.from_path(file))
    else:
        copy_other_files(source, folder)
        for name in QUANTIZATION_FILES:
            (folder / name).unlink(missing_ok=True)
    kept = {key: value for key, value in config.items() if key not in _OF_TENSORS}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
