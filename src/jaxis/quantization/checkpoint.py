from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, quantize
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.checkpoint_files import (
    MAX_SHARD_BYTES,
    Shard,
    check_destination,
    copy_other_files,
    new_folder,
    plan_shards,
    write_index,
)
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.models.common.interfaces import DropsRedundantTensors, RenamesTensors
from jaxis.models.common.tables import other_table
from jaxis.models.common.text_part import TextPart
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.tied_tables import tables_of
from jaxis.quantization.checkpoint_parts import CheckpointParts
from jaxis.quantization.checkpoints.compressed_tensors import RULES_KEY
from jaxis.quantization.export_format import ExportFormat, export_format
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import rules_to_dict


def quantize_checkpoint(
    source: Path,
    destination: Path,
    rules: RuleQuantizationConfig,
    *,
    calibrated: Mapping[str, QuantizedWeight | CodedWeight] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes a quantized copy of `source` that loads like any checkpoint; returns the bytes of its weights.

    Holds at most one tensor and its quantized form in memory. `destination` appears only when it is complete.

    Args:
      source: An unquantized checkpoint in Hugging Face format.
      destination: A folder that does not exist yet; a vision tower is copied into it unchanged.
      rules: The types of each module.
      calibrated: Weights that are quantized already, of the types that `quantize` returns, by the names of their
        modules (see `Part`); the others are quantized while they are read.
      max_shard_bytes: Maximum size of a file, unless one tensor alone is larger.
      on_progress: Called with (bytes read, total bytes).

    Raises:
      ConfigError: The rules do not fit the model, or quantize nothing in it.
      CheckpointError: The source cannot be read, is already quantized or does not match its model; or the destination
        exists or cannot be written.
    """
    check_destination(destination, "folder")
    hf_config = tables_of(HFConfig.from_folder(source), source).config
    if hf_config.get("quantization_config") is not None:
        raise CheckpointError(f"{source} is quantized already: give the unquantized checkpoint")
    config = hf_config.to_dict()
    model = construct_abstractly(VllmConfig(ModelConfig(str(source), hf_config), quant_config=rules))
    parts = CheckpointParts(model)
    modules = parts.schemes()
    if not any(scheme for _, scheme in modules.values()):
        raise ConfigError("the quantization rules leave every module as it is: there is nothing to quantize")
    tower = model.tower if isinstance(model, TextPart) else None
    with new_folder(destination) as partial:
        with Checkpoint(source) as checkpoint:
            names = _without_redundant(model, checkpoint)
            of_tower = set() if tower is None else set(filter(tower.has_tensor, checkpoint.names()))
            try:
                kept = names.keys() | of_tower
                headers = {name: _header(checkpoint, name) for name in checkpoint.names() if name in kept}
                text = ((names[name], headers[name]) for name in headers if name in names)
                parts.check(text, type(model).__name__)
                # The tower stays as it is, which formats must say of what they take for linear layers.
                modules |= {
                    name.removesuffix(".weight"): ("Linear", None)
                    for name in headers
                    if name in of_tower and name.endswith(".weight") and len(headers[name].shape) == 2
                }
                names |= {name: name for name in of_tower}
                export = export_format(modules)
                shards = plan_shards(_specs(headers.items(), names, parts, export), max_shard_bytes)
                stream = _quantized(checkpoint, names, parts, export, calibrated or {}, on_progress)
                _write_shards(partial, shards, stream)
            except CheckpointError as error:
                raise CheckpointError(f"{source}: {error}") from None
        copy_other_files(source, partial)
        config |= {**export.config, RULES_KEY: rules_to_dict(rules.resolved_rules)}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(spec.nbytes for shard in shards for spec in shard.specs.values())


def _without_redundant(model: JaxModule, checkpoint: Checkpoint) -> dict[str, str]:
    """Returns tensor name -> parameter name of the tensors that are parameters, in file order.

    Tensors that are not quantized keep their names, the others get those of the parameters, by which a model that
    renames tensors finds them, too.
    """
    names = list(checkpoint.names())
    if isinstance(model, RenamesTensors):
        in_file = {model.parameter_name(name): name for name in names}
    else:
        in_file = {name: name for name in names}
    if len(in_file) < len(names):
        twice = min(set(names) - set(in_file.values()))
        raise CheckpointError(f"{checkpoint.folder}: tensor {twice!r} is there twice, under two names: remove one")
    pairs = ((name, checkpoint.tensor(stored)) for name, stored in in_file.items())
    kept = model.without_redundant_tensors(pairs) if isinstance(model, DropsRedundantTensors) else pairs
    # A tied model's table may be there under the head's name alone.
    return {in_file.get(name) or in_file[other_table(name)]: name for name, _ in kept}


def _header(checkpoint: Checkpoint, name: str) -> HeaderTensor:
    info = checkpoint.info(name)
    return HeaderTensor.of(info.shape, info.dtype)


def _specs(
    headers: Iterable[tuple[str, np.ndarray]], names: Mapping[str, str], parts: CheckpointParts, export: ExportFormat
) -> Iterator[dict[str, TensorHeader]]:
    """Yields the tensors to write for each tensor read."""
    for name, tensor in headers:
        quantized = parts.of(name, names[name], tensor)
        if not quantized:
            yield {name: TensorHeader(tensor.dtype, tensor.shape)}
        for part in quantized:
            yield export.tensor_specs(part.module, part.weight.shape, part.scheme)


def _quantized(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    parts: CheckpointParts,
    export: ExportFormat,
    calibrated: Mapping[str, QuantizedWeight | CodedWeight],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    bytes_read = 0
    for name, tensor in checkpoint.iterate():
        if name in names:
            quantized = parts.of(name, names[name], tensor)
            if not quantized:
                yield name, tensor
            for part in quantized:
                try:
                    weight = calibrated.get(part.module) or quantize(part.weight, part.scheme)
                except ValueError as error:
                    raise CheckpointError(f"tensor {name!r} {error}") from None
                yield from export.tensors(part.module, weight).items()
        bytes_read += tensor.nbytes
        if on_progress is not None:
            on_progress(bytes_read, checkpoint.total_bytes)


def _write_shards(folder: Path, shards: list[Shard], stream: Iterator[tuple[str, np.ndarray]]) -> None:
    for shard in shards:
        with SafetensorsWriter(folder / shard.name, shard.specs) as writer:
            for _ in shard.specs:
                writer.write(*next(stream))
    # Releases the last tensor's pages, and reports its bytes as read.
    next(stream, None)
    write_index(folder, shards)
