"""Weights that may take the place of a running engine's: their sources, and how they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jaxis.config.quantization_files import CONFIG
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import make_vllm_config
from jaxis.engine.fingerprint import checkpoint_digest
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import OpenedModel
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.loading.given_tensors import GivenTensors, GivenWeights
from jaxis.loading.open_checkpoint import TensorListing, open_checkpoint, read_config_values
from jaxis.loading.packed_name import is_packed

Weights: TypeAlias = str | os.PathLike[str] | GivenWeights | JaxModule
"""Folder of a checkpoint; tensors by their names in a checkpoint; or a model with loaded weights.

Such a model must be as the engine itself would load it. Its arrays are not copied.
"""

# Keys of config.json that do not change a model's results.
_IRRELEVANT = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


@dataclass(frozen=True)
class NewWeights:
    """Weights that were read and checked, and are on the devices.

    Attributes:
      loaded: The model with these weights.
      digest: Digest of the files of a folder; a unique name for other weights.
      folder: Folder of the weights; None if they came from the caller's memory.
    """

    loaded: LoadedModel
    digest: bytes
    folder: Path | None


def read_weights(
    weights: Weights,
    args: EngineArgs,
    opened: OpenedModel,
    meshes: Sequence[jax.sharding.Mesh],
    progress: ProgressDisplay,
) -> NewWeights:
    """Puts weights on the devices of the pipeline stages, stored as the engine's arguments say.

    Raises:
      ConfigError: The folder is of another model.
      CheckpointError: A tensor is missing, unknown, or of another shape or type.
    """
    if isinstance(weights, JaxModule):
        config = make_vllm_config(args, opened.path, opened.hf_config, meshes[0].devices.flat[0].platform, stored={})
        return NewWeights(LoadedModel(config, meshes, [weights]), _new_digest(), None)
    args = dataclasses.replace(args, load_format="auto")  # the new weights are real even if the first were random
    stored = _stored(opened.path)
    if isinstance(weights, str | os.PathLike):
        folder = Path(weights)
        _check_same_model(folder, opened.config.values)
        digest = hashlib.sha256(checkpoint_digest(folder).encode()).digest()
        if is_packed(folder):
            return NewWeights(
                dataclasses.replace(opened, path=folder, packed=None).load(args, meshes, progress), digest, folder
            )
        with open_checkpoint(folder) as checkpoint:
            tensors = GivenTensors(checkpoint, stored)
            return NewWeights(opened.load(args, meshes, progress, tensors), digest, folder)
    if not isinstance(weights, Mapping):
        if not isinstance(weights, Iterable):
            raise CheckpointError("the weights must be a folder, a mapping of names to arrays, or pairs of both")
        weights = dict(weights) if len(meshes) > 1 else weights
    tensors = GivenTensors(weights, stored)
    return NewWeights(opened.load(args, meshes, progress, tensors), _new_digest(), None)


def check_can_change(args: EngineArgs) -> None:
    """Raises a ConfigError for an engine whose weights cannot be changed."""
    if args.nnodes > 1:
        raise ConfigError(f"weights cannot be changed with nnodes={args.nnodes}: the other hosts would keep theirs")
    if args.tensor_changes is not None:
        raise ConfigError("weights cannot be changed where --adapter merges an adapter into them: merge it beforehand")


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        return TensorListing(path).infos
    except CheckpointError:
        return {}


def _new_digest() -> bytes:
    return hashlib.sha256(uuid.uuid4().bytes).digest()


def _check_same_model(folder: Path, values: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a folder's config.json differs from the engine's."""
    if not (folder / CONFIG).exists():
        return
    found = read_config_values(folder).values
    for key in sorted(found.keys() & values.keys() | {"quantization_config"}):
        if key in _IRRELEVANT or key.startswith("_") or key.endswith("_token_id"):
            continue
        if found.get(key) != values.get(key):
            raise ConfigError(
                f"{folder / CONFIG} has {key}={found.get(key)!r}, and the engine's model {values.get(key)!r}: only "
                "weights of the same model can take the place of its own"
            )
