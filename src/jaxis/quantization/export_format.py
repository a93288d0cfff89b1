from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.kernels.weights import WeightScheme
from jaxis.loading.safetensors_writer import TensorHeader
from jaxis.quantization import compressed_tensors_export, mlx_export
from jaxis.quantization.checkpoints import mlx

Modules = Mapping[str, tuple[str, WeightScheme | None]]
"""(Class, scheme) of every module with a weight matrix, by name; see `CheckpointParts.schemes`."""


@dataclass(frozen=True)
class ExportFormat:
    """Format of the quantized weights that are written: compressed-tensors, or MLX's where that has no counterpart.

    Attributes:
      config: Keys for config.json.
      tensor_specs: (module, shape, scheme) -> the specs of the tensors of a weight [out, in].
      tensors: (module, weight) -> the tensors of a weight of numpy arrays.
    """

    config: Mapping[str, Any]
    tensor_specs: Callable[[str, tuple[int, int], WeightScheme], dict[str, TensorHeader]]
    tensors: Callable[[str, Any], dict[str, np.ndarray]]


def export_format(modules: Modules) -> ExportFormat:
    """Returns the format for a checkpoint with these modules: MLX's if any is affine. Raises ConfigError if none."""
    if any(scheme and scheme.weight_calibration_method == "affine" for _, scheme in modules.values()):
        config = {mlx.KEY: mlx_export.quantization_config(modules)}
        return ExportFormat(config, mlx_export.tensor_specs, mlx_export.tensors)
    config = {"quantization_config": compressed_tensors_export.quantization_config(modules)}
    return ExportFormat(config, compressed_tensors_export.tensor_specs, compressed_tensors_export.tensors)
