"""LayerScope: a layer's place in a model, and everything that its constructor needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import without_quantization
from jaxis.layers.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.config.quantization import QuantizationConfig
    from jaxis.layers.norm import Norm


@dataclass(frozen=True)
class LayerScope:
    """Arguments of a composite layer's constructor; `scope / "self_attn"` is the scope of the child of that name.

    Layers read what they need from a scope but do not keep it: decoder layers that differ only in their place must
    compare equal, so that they are traced once.

    Attributes:
      quant_config: Decides how the weights of layers in this scope are stored and applied; None: unchanged.
      prefix: Dotted name of the layer in the model.
      layer_index: Index, from 0, of the decoder layer that this is or belongs to; meaningless elsewhere.
      names: Names of modules in the model's checkpoints.
      make_norm: Creates the family's norms, of decoder layers and before the head; None: RMS norms.
    """

    vllm_config: VllmConfig
    rngs: nnx.Rngs
    quant_config: QuantizationConfig | None = None
    prefix: str = ""
    layer_index: int = 0
    names: CheckpointNames = field(default_factory=CheckpointNames)
    make_norm: Callable[[LayerScope], Norm] | None = None

    def __truediv__(self, name: str) -> LayerScope:
        return dataclasses.replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def layer(self, index: int) -> LayerScope:
        return dataclasses.replace(self / "layers" / str(index), layer_index=index)

    @property
    def name_in_checkpoint(self) -> str:
        """Dotted name of the layer in the checkpoint, by which quantization knows it."""
        return self.names.name_in_checkpoint(self.prefix)

    @property
    def of_weights(self) -> dict[str, Any]:
        """Arguments of leaf layers, whose weights may be quantized."""
        quantization = {"quant_config": self.quant_config, "prefix": self.name_in_checkpoint}
        return {"rngs": self.rngs, "dtype": self.dtype, **quantization}

    @property
    def config(self) -> HFConfig:
        return self.vllm_config.model_config.hf_config

    @property
    def dtype(self) -> DTypeLike:
        return self.vllm_config.model_config.dtype

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the engine will serve, in tokens."""
        return self.vllm_config.model_config.max_model_len


def never_quantized(scope: LayerScope) -> LayerScope:
    """Returns the scope of a small layer that decides much: its weight is not quantized, or dequantized on loading."""
    return dataclasses.replace(scope, quant_config=without_quantization(scope.quant_config))
