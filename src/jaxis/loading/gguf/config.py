"""The keys of a GGUF file as a config.json, and the other way, by the declarations of `families`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.config_reader import ConfigReader, ReadTensor, Values
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.families import READ, WRITTEN
from jaxis.loading.gguf.rope_keys import rope_tensors
from jaxis.loading.gguf.stored_part import Sizes
from jaxis.loading.gguf.table import FileKeys
from jaxis.loading.gguf.tensor_names import GGUFNames
from jaxis.loading.gguf_config_keys import DENSE_SIZES, POOLING_MODE

_POOLING_MODES = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True)
class GGUFConfig:
    """Config that the keys of a GGUF file describe.

    Attributes:
      values: Content of the corresponding config.json.
      assumptions: Sentences about assumed values, as in `GGUFCheckpoint`.
      small_tensors: Tensors of the checkpoint that the file has as keys, float32.
    """

    tensors: GGUFNames
    values: Values
    sizes: Sizes
    assumptions: tuple[str, ...]
    small_tensors: Mapping[str, np.ndarray]


def read_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], read_tensor: ReadTensor, source: str
) -> GGUFConfig:
    """Reads the keys of a file; `read_tensor` reads a tensor of floats, None if there is none of the name.

    Raises ConfigError, which names `source`, if the architecture, or something in the keys, is not supported.
    """
    keys = Keys(metadata, tensors, source)
    if keys.architecture not in READ:
        raise ConfigError(
            f"{source} has the architecture {keys.architecture!r}; supported in GGUF files: "
            f"{', '.join(sorted(READ))}. Use the original checkpoint if its family is supported"
        )
    declared = READ[keys.architecture]
    reader = ConfigReader(keys, read_tensor, has_heads=declared[0].has_heads, is_causal=declared[0].is_causal)
    family = next(each for each in declared if each.is_of(reader))
    values = family.read(reader) | _pooling(keys)
    keys.check_all_read()
    names = dataclasses.replace(family.names, renames=(*(family.names.renames or ()), *family.more_renames(values)))
    return GGUFConfig(names, values, reader.sizes, tuple(keys.assumptions), reader.small_tensors)


@dataclass(frozen=True)
class ModelKeys:
    """A model's description in a GGUF file, with notes for the user.

    Attributes:
      architecture: `general.architecture`.
      has_biases: True if the projections can have biases in llama.cpp.
      tensors: Float32 tensors that describe what no key can.
    """

    architecture: str
    names: GGUFNames
    has_biases: bool
    keys: FileKeys
    tensors: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def model_keys(config: HFConfig) -> ModelKeys:
    """Describes a text model with GGUF's keys: the inverse of `read_config`, which says what is lost.

    Raises ConfigError if the family is not written, or llama.cpp's files cannot describe the model.
    """
    model_type = config["model_type"]
    family = WRITTEN.get(model_type)
    if family is None or family.written is None:
        raise ConfigError(
            f"{config.source}: models of the type {model_type!r} cannot be written to GGUF; those that can: "
            f"{', '.join(sorted(WRITTEN))}"
        )
    keys = family.write(config)
    notes = [family.written.note(config)]
    if not family.written.window and config.get("sliding_window") is not None:
        notes.append(f"llama.cpp does not apply the sliding window of {config['sliding_window']} tokens to this model")
    return ModelKeys(
        family.model[0],
        family.names,
        family.written.biases,
        keys,
        rope_tensors(config),
        tuple(note for note in notes if note is not None),
    )


def _pooling(keys: Keys) -> Values:
    """Returns the pooling of a model's hidden states, if the file describes it; ConfigError if it is not supported."""
    kind = keys.get("pooling_type", 0)
    if kind not in (0, *_POOLING_MODES):
        raise ConfigError(
            f"{keys.source} has {keys.architecture}.pooling_type = {kind}, of which 1 (mean), 2 (first token) and 3 "
            "(last token) are supported: use the original checkpoint"
        )
    sizes = {
        name: (keys.integer(f"{name}_feat_in"), keys.integer(f"{name}_feat_out"))
        for name in ("dense_2", "dense_3")
        if keys.has_tensor(f"{name}.weight")
    }
    return ({POOLING_MODE: _POOLING_MODES[kind]} if kind else {}) | ({DENSE_SIZES: sizes} if sizes else {})
