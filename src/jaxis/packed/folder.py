"""A packed folder that is read: checked whole, and mapped."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx

from jaxis.config.quantization import QuantMethod
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import as_weight
from jaxis.kernels.weights.shards import placement
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.layers.weight_loader import place_array
from jaxis.loading.packed_name import PACKED
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.packed.digests import arithmetic, begin_digests, file_digest, seal
from jaxis.packed.values import restore
from jaxis.version import __version__


class PackedFolder:
    """Weights of a packed folder, as the QuantizationConfig of the models that it holds.

    Attributes:
      dtype: Type of the model, such as "float32".
      parts: Names of the classes of its models.
      weight_bytes: Bytes of the weights of all models.

    Raises:
      CheckpointError: The folder is broken, or was changed.
      ConfigError: It was packed by another version of jaxis.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with SafetensorsFile(folder / PACKED) as file:
            text = file.metadata.get("description", "")
            if file.metadata.get("seal") != seal(text, {name: file.info(name).nbytes for name in file.names}):
                self._refuse("is damaged")
            self._arrays = {name: file.tensor(name) for name in file.names}
        described = json.loads(text)
        if (version := described["version"]) != __version__:
            raise ConfigError(
                f"{folder} was packed by jaxis {version}, and this is {__version__}: pack the model again"
            )
        self.dtype: str = described["dtype"]
        self.parts: Mapping[str, Mapping[str, Any]] = described["parts"]
        self.weight_bytes = sum(array.nbytes for array in self._arrays.values())
        self._digests: Mapping[str, str] = described["digests"]
        self._arithmetic: str = described["arithmetic"]
        self._files: Mapping[str, str] = described["files"]

    @functools.cached_property
    def digests(self) -> Callable[[], list[str]]:
        """Function that returns digests of the arrays, which are computed on other threads from the first use on."""
        return begin_digests([*self._arrays.values()])

    def get_quant_method(self, layer: Any, prefix: str) -> QuantMethod | None:
        """Returns None: `fill` replaces every parameter."""
        del layer, prefix
        return None

    def check_all_used(self) -> None:
        """Does nothing: `fill` checks the parameters."""

    def fill(self, model: JaxModule) -> None:
        """Gives every parameter of a model that was constructed abstractly its value.

        Raises:
          CheckpointError: Bytes have changed since they were packed, or the model is another.
          ConfigError: This version of jaxis packs other bytes.
        """
        _ = self.digests
        described = self.parts.get(name := type(model).__name__)
        if described is None:
            self._refuse(f"holds {', '.join(self.parts)}, and config.json asks for {name}")
        for path, module in named_modules(model):
            if isinstance(module, LatentUpProjection) and f"{path}.key_weight" in described:
                module.take_packed(None, None)
        parameters = dict(named_parameters(model))
        if differing := described.keys() ^ parameters.keys():
            self._refuse(f"does not fit the model: {min(differing)} is in one of them only")
        for path, param in parameters.items():
            self._fill(path, param, described[path])
        self._check()

    def _fill(self, path: str, param: nnx.Param, described: Any) -> None:
        try:
            value, target = restore(described, self._take), param.get_value()
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"has {path} in a form that is not known ({error})")
        if target is not None and (shape := as_weight(value).shape) != target.shape:
            self._refuse(f"has {path} of shape {list(shape)}, and the model {list(target.shape)}")
        axes = param.get_metadata().get("logical_axes")
        if isinstance(value, np.ndarray):
            param.set_value(place_array(value, axes))
            return
        places = None if axes is None else placement(value, axes)
        param.set_value(jax.tree.map(lambda a: place_array(a, places) if isinstance(a, np.ndarray) else a, value))

    def _take(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, dtype, buffer=self._arrays[name])

    def _check(self) -> None:
        if self._arithmetic != arithmetic():
            raise ConfigError(
                f"{self.folder} was packed with other arithmetic than this jaxis has: pack the model again"
            )
        for name, digest in self._files.items():
            path = self.folder / name
            if not path.is_file() or file_digest(path) != digest:
                raise CheckpointError(f"{path} is not the file that was packed: pack the model again")
        found = dict(zip(self._arrays, self.digests(), strict=True))
        if damaged := [name for name in found if found[name] != self._digests[name]]:
            self._refuse(f"is damaged: {len(damaged)} of {len(found)} arrays have other bytes than were packed")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.folder / PACKED} {what}: pack the model again")
