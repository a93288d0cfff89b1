"""Writes a checkpoint as a GGUF file, which llama.cpp runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bringup.convert.completeness import check_complete
from jaxis.bringup.convert.config_difference import first_difference
from jaxis.bringup.convert.gguf_file import GGUFFileWriter, GGUFValue
from jaxis.bringup.convert.gguf_tensors import FileTensor, gguf_tensors
from jaxis.bringup.convert.gguf_tokenizer import gguf_tokenizer_keys
from jaxis.bringup.convert.partial_folder import Conversion, OnProgress
from jaxis.config.expert_counts import num_experts
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.extras import check_extra
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.checkpoint_files import check_destination
from jaxis.loading.gguf.config import ModelKeys, model_keys, read_config
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.generation import SETTINGS
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.gguf.stored_part import Sizes
from jaxis.loading.gguf.table import head_dim
from jaxis.loading.gguf.tensor_names import GGUFNames
from jaxis.loading.gguf_block_types import FLOAT32, TYPE_OF_NAME
from jaxis.loading.open_checkpoint import open_checkpoint, read_generation_defaults, read_hf_config
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint
from jaxis.models.common.interfaces import has_tied_head
from jaxis.models.common.tables import EMBEDDINGS, HEAD
from jaxis.models.tied_tables import config_as_stored
from jaxis.tokenizer import Tokenizer

_QUANTIZATION_VERSION = 2
# llama.cpp's names of file types, LLAMA_FTYPE_*.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}


def convert_to_gguf(
    source: Path,
    destination: Path,
    outtype: str = "auto",
    *,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Writes the checkpoint `source` as one GGUF file with its tokenizer and chat template.

    Vectors and routers are float32, as llama.cpp needs them. The file appears when it is complete.

    `outtype` is "f32", "f16", "bf16", "q8_0" (rows that blocks do not divide become f16), or "auto" for each tensor's
    type in the checkpoint. `on_note` gets each fact that the file cannot express or llama.cpp handles otherwise;
    `on_progress` gets (bytes done, bytes in all).

    Raises:
      ConfigError: The model is not supported, or cannot be described by a GGUF file; or the `gguf` package is missing.
      CheckpointError: The source cannot be read or is not complete, its tokenizer cannot be described, or the
        destination exists or cannot be written.
    """
    check_extra("gguf", "writing a GGUF file")
    check_destination(destination)
    if destination.suffix != ".gguf":
        raise CheckpointError(f"{destination} does not end in .gguf: give the name of a GGUF file")
    with open_checkpoint(source) as checkpoint:
        if isinstance(checkpoint, GGUFCheckpoint):
            raise CheckpointError(f"{source} is already a GGUF file")
        plan = _plan(source, checkpoint, outtype)
        for note in plan.notes:
            if on_note is not None:
                on_note(note)
        _write(destination, plan, checkpoint, on_progress)
    return Conversion(len(checkpoint.names()), plan.total_bytes, 0, len(plan.headers))


@dataclass(frozen=True)
class _Plan:
    """Everything about the file but the weights; `original_names` maps names in `tensors` to the checkpoint's."""

    architecture: str
    keys: dict[str, GGUFValue]
    tensors: list[FileTensor]
    constants: Mapping[str, np.ndarray]
    headers: dict[str, GGUFTensor]
    original_names: dict[str, str]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(header.nbytes for header in self.headers.values())


def _plan(source: Path, checkpoint: Checkpoint | OrbaxCheckpoint, outtype: str) -> _Plan:
    config = _text_config(source)
    described = model_keys(config)
    model = check_complete(source, checkpoint)
    original_names = _original_names(checkpoint, source)
    left_out = _left_out(checkpoint, original_names)
    if has_tied_head(model):
        head = original_names.pop(HEAD, None)  # a copy of the embeddings, or their only name
        original_names |= {} if head is None or EMBEDDINGS in original_names else {EMBEDDINGS: head}
    infos = {name: checkpoint.info(original) for name, original in original_names.items()}
    tensors = _tensors({name: info.shape for name, info in infos.items()}, config, described.names, source)
    biases = [tensor.sources[0] for tensor in tensors if tensor.name.endswith(("_q.bias", "_output.bias", "_up.bias"))]
    if biases and not described.has_biases:
        raise ConfigError(
            f"{source}: llama.cpp's files of the architecture {described.architecture} have no biases, "
            f"but the model has {biases[0]}"
        )
    headers = {name: GGUFTensor(name, FLOAT32, constant.shape, 0) for name, constant in described.tensors.items()}
    headers |= {tensor.name: _header(tensor, infos[tensor.sources[0]].dtype, outtype, source) for tensor in tensors}
    tokenizer = Tokenizer.from_path(source)
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer, which a GGUF file needs")
    defaults = read_generation_defaults(source)
    ends = _end_ids(config, tokenizer, defaults)
    num_tokens = headers["token_embd.weight"].shape[0]
    vocabulary = gguf_tokenizer_keys(tokenizer, num_tokens, ends, described.architecture, str(source))
    keys = _general_keys(source, headers) | _sampling_keys(defaults)
    keys |= {f"{described.architecture}.{key}": value for key, value in described.keys.items()}
    _check_read_back(config, described, keys, headers, source)
    return _Plan(
        described.architecture,
        keys | vocabulary.keys,
        tensors,
        described.tensors,
        headers,
        original_names,
        described.notes + vocabulary.notes + left_out,
    )


def _text_config(source: Path) -> HFConfig:
    config = config_as_stored(source)
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{source} is quantized; weights are written to GGUF from float checkpoints: give the original one, and "
            "--outtype q8_0 for a quantized file"
        )
    return config.get_text_config()


def _original_names(checkpoint: Checkpoint | OrbaxCheckpoint, source: Path) -> dict[str, str]:
    """Maps a name in a checkpoint of the text model alone to the name in this one; the other parts are left out."""
    if "text_config" not in read_hf_config(source):
        return {name: name for name in checkpoint.names()}
    found = {}
    for name in checkpoint.names():
        if name == "lm_head.weight":
            found[name] = name
        elif name.startswith("model.language_model."):
            found["model." + name.removeprefix("model.language_model.")] = name
        elif name.startswith("language_model."):
            found[name.removeprefix("language_model.")] = name
    return found


def _left_out(checkpoint: Checkpoint | OrbaxCheckpoint, original_names: Mapping[str, str]) -> tuple[str, ...]:
    """Makes a note on tensors outside the text model, if there are any."""
    if not (count := len(set(checkpoint.names()) - set(original_names.values()))):
        return ()
    return (
        f"the file has the text alone: {count} tensors of other parts, such as a vision tower, are left out (llama.cpp "
        "reads those from an mmproj file, which is not written)",
    )


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], config: HFConfig, names: GGUFNames, source: Path
) -> list[FileTensor]:
    heads = config["num_attention_heads"]
    sizes = Sizes(
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads", heads),
        head_dim(config),
        num_experts(config) or 0,
    )
    return gguf_tensors(shapes, names, sizes, config.get("qk_nope_head_dim", 0), str(source))


def _header(tensor: FileTensor, dtype: np.dtype, outtype: str, source: Path) -> GGUFTensor:
    if tensor.is_float32:
        name = "F32"
    elif outtype == "auto":
        name = next((name for name in ("F32", "F16", "BF16") if TYPE_OF_NAME[name].dtype == dtype), "")
        if not name:
            raise CheckpointError(f"{source}: {tensor.sources[0]} is {dtype}, which has no type in GGUF")
    else:
        name = outtype.upper()
        if tensor.shape[-1] % TYPE_OF_NAME[name].elements:
            name = "F16"
    return GGUFTensor(tensor.name, TYPE_OF_NAME[name], tensor.shape, 0)


def _general_keys(source: Path, headers: Mapping[str, GGUFTensor]) -> dict[str, GGUFValue]:
    sizes: dict[str, int] = {}
    for header in headers.values():
        sizes[header.block_type.name] = sizes.get(header.block_type.name, 0) + header.nbytes
    return {
        "general.type": "model",
        "general.name": source.name or "model",
        "general.file_type": _FILE_TYPES[max(sizes, key=lambda name: sizes[name])],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def _sampling_keys(defaults: Mapping[str, Any]) -> dict[str, GGUFValue]:
    return {key: kind(defaults[name]) for key, (name, kind) in SETTINGS.items() if name in defaults}


def _end_ids(config: HFConfig, tokenizer: Tokenizer, defaults: Mapping[str, Any]) -> set[int]:
    ends = defaults.get("eos_token_id", config.get("eos_token_id"))
    if ends is None:
        ends = tokenizer.eos_token_id
    return set() if ends is None else set(ends if isinstance(ends, list) else [ends])


def _check_read_back(
    config: HFConfig,
    described: ModelKeys,
    keys: Mapping[str, GGUFValue],
    headers: Mapping[str, GGUFTensor],
    source: Path,
) -> None:
    """Reads the keys as jaxis would from the file, and compares them with the config.

    Raises:
      ConfigError: They differ: llama.cpp's files cannot describe this model.
    """
    metadata: dict[str, Any] = {"general.architecture": described.architecture}
    metadata |= {key: np.asarray(value) if isinstance(value, list) else value for key, value in keys.items()}
    metadata = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in metadata.items()}
    found = read_config(metadata, headers, described.tensors.get, str(source))
    if (difference := first_difference(config, found.values, str(source))) is not None:
        raise ConfigError(
            f"{source} cannot be written to GGUF, which has no key for all that the model has: {difference}"
        )


def _write(
    destination: Path, plan: _Plan, checkpoint: Checkpoint | OrbaxCheckpoint, on_progress: OnProgress | None
) -> None:
    partial = destination.absolute().with_name(f".{destination.name}.partial")
    done = 0
    try:
        with GGUFFileWriter(partial, plan.architecture, plan.keys, plan.headers) as writer:
            for name, constant in plan.constants.items():
                writer.write(name, constant)
            for tensor in plan.tensors:
                sources = [checkpoint.tensor(plan.original_names[name]) for name in tensor.sources]
                writer.write(tensor.name, tensor.make(sources))
                done += plan.headers[tensor.name].nbytes
                if on_progress is not None:
                    on_progress(done, plan.total_bytes)
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error.strerror or error}") from error
