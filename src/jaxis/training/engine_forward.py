"""The engine's forward pass, made differentiable: its kernels, its order of sums, and its way of applying adapters.

Training then sees log-probabilities that are bit for bit those that the engine returns when it samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels import native
from jaxis.kernels.weights import PackedWeight
from jaxis.layers.addition import HeadwiseAddition, LowRankAddition, StepRows
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.kv_cache_spec import HandsOnSelection, HasCache, KVCacheSpec
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.partial_weight import WeightLoader
from jaxis.lora.adaptable import table_type
from jaxis.training.adapters import AdaptedLayers
from jaxis.training.config import TrainConfig
from jaxis.training.functional_model import FunctionalModel, Values
from jaxis.training.objectives import Forward, make_forward

BLOCK_SIZE = 16
_PACKED = "packed "


def check_engine_forward(config: TrainConfig) -> None:
    """Checks that the engine's forward pass supports a training configuration. Raises ConfigError if it does not."""
    reasons = {
        "the native kernels do not run here": not native.usable(),
        "it runs on one device: leave out fsdp": config.fsdp.enable_fsdp,
        "it drops nothing: set peft.lora_dropout to 0": config.training.use_peft and bool(config.peft.lora_dropout),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"training.forward_pass='engine' cannot be honoured: {reason}; or give plain")


def _check_layers(model: JaxModule) -> None:
    """Raises ConfigError if the engine's kernel of a layer has no derivatives."""
    for name, module in named_modules(model):
        specs = KVCacheSpec | LatentCacheSpec
        is_known = isinstance(module.kv_cache_spec, specs) if isinstance(module, HasCache) else True
        if not is_known or isinstance(module, HandsOnSelection):
            raise ConfigError(
                f"training.forward_pass='engine' cannot be honoured: the kernels of {name} ({type(module).__name__}) "
                "have no derivatives; give plain"
            )


class EngineWeights:
    """A packed model on the native kernels, whose trained weights are packed again after each step.

    Raises ConfigError if the kernels have no derivatives.
    """

    def __init__(self, model: JaxModule, dtype: DTypeLike) -> None:
        _check_layers(model)
        self._scratch = ScratchCache(BLOCK_SIZE, jnp.dtype(dtype))
        self._types: dict[str, jnp.dtype] = {}
        self._loaders: dict[str, WeightLoader] = {}
        # Weights that the engine splits by heads.
        self._by_heads = {n: m for n, m in named_modules(model) if isinstance(m, LatentUpProjection)}
        _, parameters, _ = nnx.split(model, nnx.Param, ...)
        for path, param in nnx.to_flat_state(parameters):
            name, metadata = ".".join(map(str, path)), cast(nnx.Param, param).get_metadata()
            self._types[name] = cast(nnx.Param, param).get_value().dtype
            loader = metadata.get("weight_loader")
            if isinstance(loader, WeightLoader):
                self._loaders[name] = loader
        for layer in self._by_heads.values():
            layer.take_packed(None, None)
        self._model = FunctionalModel(model)

    def packed(self, trained: Mapping[str, jax.Array]) -> dict[str, PackedWeight]:
        """Packs the trained weights for `combine`, which finds them under names of their own in `frozen`.

        Raises ConfigError if the engine has a weight in a format whose products have no derivatives.
        """
        packed: dict[str, PackedWeight] = {}
        for name in trained.keys() & self._loaders.keys():
            weight = self._loaders[name].weight_of(trained[name])
            layer = self._by_heads.get(name.removesuffix(".weight"))
            if isinstance(weight, PackedWeight) and layer is not None:
                # One type in all steps, so that programs are compiled once.
                heads = layer.packed_heads(weight, jnp.bfloat16 if weight.storage == "bfloat16" else jnp.float32)
                packed |= {_PACKED + part: each for part, each in zip(_parts_of_heads(name), heads, strict=True)}
            elif isinstance(weight, PackedWeight):
                packed[_PACKED + name] = weight
            elif not isinstance(weight, jax.Array | np.ndarray):
                raise ConfigError(
                    f"training.forward_pass='engine' cannot be honoured: the engine has {name} as {weight.storage}, "
                    "which is not packed; give plain"
                )
        return packed

    def served(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the model's weights, with the weights from `packed` in their places."""
        packed = {name.removeprefix(_PACKED): value for name, value in frozen.items() if name.startswith(_PACKED)}
        others = trained.keys() - packed.keys() - {f"{name}.weight" for name in self._by_heads}
        return {**frozen, **{name: trained[name].astype(self._types[name]) for name in others}, **packed}

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the weights of `served`, where each packed weight also has the float array that gets its gradient."""
        values = dict(self.served(trained, frozen))
        masters = dict(trained)
        for name, layer in self._by_heads.items():
            of_heads = layer.by_heads(trained[f"{name}.weight"])
            masters |= zip(_parts_of_heads(f"{name}.weight"), of_heads, strict=True)
        for name, master in masters.items():
            if isinstance(weight := values.get(name), PackedWeight):
                values[name] = dataclasses.replace(weight, master=master)
        return values

    @property
    def has_experts(self) -> bool:
        return self._model.has_experts

    def forward(self, *, recompute: bool, observes_routers: bool) -> Forward:
        """Makes the forward pass for weights from `combine` or `served`; arguments as of `make_forward`."""
        return make_forward(
            self._model,
            lambda values, _: self.bind(values),
            recompute=recompute,
            observes_routers=observes_routers,
            scratch=self._scratch,
        )

    def bind(self, values: Values) -> JaxModule:
        return self._model.bind(values)


def _parts_of_heads(name: str) -> tuple[str, str]:
    """Returns the names of the engine's two parameters for the weight of a `LatentUpProjection`."""
    layer = name.removesuffix(".weight")
    return f"{layer}.key_weight", f"{layer}.value_weight"


class EngineAdapters:
    """A packed model on the native kernels with one adapter place, for the layers that get adapters.

    Raises ConfigError if the engine does not support adapters in one of the layers.
    """

    def __init__(self, model: JaxModule, layers: AdaptedLayers, dtype: DTypeLike) -> None:
        _check_layers(model)
        self._layers, self._dtype = layers, table_type(dtype)
        self._scratch = ScratchCache(BLOCK_SIZE, jnp.dtype(dtype))
        self._additions: dict[str, tuple[str, LowRankAddition | HeadwiseAddition]] = {}
        rows, modules, rank = StepRows(), dict(named_modules(model)), layers.params.lora_r
        for name, (size_in, size_out) in layers.sizes.items():
            layer = cast(JaxLinear, modules[name])
            if isinstance(layer, JaxLmHead):
                raise ConfigError(
                    f"training.forward_pass='engine' cannot be honoured: requests have no adapters of {name!r}; give "
                    "plain, or leave it out of peft.lora_target_modules"
                )
            if isinstance(layer, LatentUpProjection):
                sizes = layer.input_size, layer.key_dim, layer.value_dim, layer.num_heads
                addition = HeadwiseAddition(1, rank, *sizes, rows, self._dtype)
                layer.head_addition, self._additions[f"{name}.head_addition"] = addition, (name, addition)
            else:
                addition = LowRankAddition(1, rank, size_in, size_out, rows, self._dtype)
                layer.addition, self._additions[f"{name}.addition"] = addition, (name, addition)
        self._model = FunctionalModel(model)
        [self._slots] = [name for name in self._model.other_names if name.endswith("addition.rows.slots")]

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the model's weights and, under names of their own, the adapter's matrices in the engine's layout."""
        tables = {}
        for place, (name, addition) in self._additions.items():
            a, b = self._layers.matrices(name, trained)
            entries = addition.entries(a, (jnp.float32(self._layers.scale) * b).T)
            tables |= {f"{place}.{table}": entry[None].astype(self._dtype) for table, entry in entries.items()}
        return {**frozen, **tables}

    @property
    def has_experts(self) -> bool:
        return self._model.has_experts

    def forward(self, *, recompute: bool, observes_routers: bool, head_is_frozen: bool) -> Forward:
        """Makes the forward pass for weights from `combine`, or without an adapter; arguments as of `make_forward`."""
        return make_forward(
            self._model,
            lambda values, _: self.bind(values),
            recompute=recompute,
            observes_routers=observes_routers,
            head_is_frozen=head_is_frozen,
            scratch=self._scratch,
        )

    def bind(self, values: Values) -> JaxModule:
        """Returns the model with the weights from `combine`, or with weights without an adapter."""
        adapted = [place for place in self._additions if f"{place}.a" in values]
        ranks = jnp.full(1, self._layers.params.lora_r, jnp.int32)
        others = {**values, **{f"{place}.ranks": ranks for place in adapted}}
        return self._model.bind(values, {**others, self._slots: jnp.full(1, bool(adapted), jnp.int32)})
