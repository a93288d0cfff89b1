"""The two forward passes that are differentiated: in plain JAX, and the engine's, with its kernels and order of sums.

By the engine's, training sees log-probabilities that are bit for bit those that the engine returns when it samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar, cast

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
from jaxis.training.adapters import AdaptedLayers, choose_layers
from jaxis.training.base_model import BaseModel
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import DISTILLATION, ENGINE, GRPO, PLAIN
from jaxis.training.functional_model import FunctionalModel, Values, cast_floats

BLOCK_SIZE = 16
_PACKED = "packed "


class ForwardPass:
    """A forward pass of a model whose weights are arguments, in plain JAX; `EnginePass` is another one.

    Args:
      model: The model, with or without weights.
      dtype: Data type of the pass.
      layers: Layers that have adapters; None: all weights are trained.

    Attributes:
      is_packed: True if the model has weights that are packed for the native kernels.
      model: The model as a function of its weights.
      scratch: Cache that the layers' attention needs; None: none.

    Raises:
      ConfigError: The pass does not support the model or the layers.
    """

    is_packed: ClassVar[bool] = False
    scratch: ScratchCache | None = None

    def __init__(self, model: JaxModule, dtype: DTypeLike, layers: AdaptedLayers | None = None) -> None:
        self.model, self._dtype, self._layers = FunctionalModel(model), dtype, layers

    def with_weights(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the values of the model's parameters, differentiable by trained float32 weights."""
        return {**frozen, **cast_floats(trained, self._dtype)}

    def with_adapters(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the values of the model's parameters, differentiable by trained adapters."""
        assert self._layers is not None
        return self._layers.combine(trained, frozen)

    def packed(self, trained: Mapping[str, jax.Array]) -> Values:
        """Returns what `with_weights` must find in `frozen` and depends on trained weights."""
        del trained
        return {}

    def served(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the values of `with_weights` as the engine has them, without what derivatives need."""
        return self.with_weights(trained, frozen)

    def bind(self, values: Values) -> JaxModule:
        """Returns the model with values from `with_weights` or `with_adapters`, or without adapters."""
        return self.model.bind(values)


def choose_forward_pass(config: TrainConfig, base: BaseModel) -> tuple[TrainConfig, str | None]:
    """Chooses the pass where the user did not: the engine's if the run samples answers, where it is supported.

    Returns the configuration and, if such a run gets the plain pass, a line that says why. Raises ConfigError if the
    user chose the engine's, and it is not supported.
    """
    params = config.training
    is_asked_for, samples = params.forward_pass == ENGINE, params.trainer_type in (GRPO, DISTILLATION)
    if params.forward_pass == PLAIN or not (is_asked_for or samples):
        return _with_pass(config, PLAIN), None
    reason = _unsupported(config)
    if reason is None:
        model = base.construct(base.compute_dtype, packed=True)
        layers = choose_layers(model, config.peft, base.module_names()) if params.use_peft else None
        reason = _unsupported_layer(model, layers)
    if reason is None:
        return _with_pass(config, ENGINE), None
    if is_asked_for:
        raise _refusal(reason)
    said = f"the forward pass of training is plain, with other last bits than that of sampling: {reason}"
    return _with_pass(config, PLAIN), said


def _with_pass(config: TrainConfig, forward_pass: str) -> TrainConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, forward_pass=forward_pass))


def _unsupported(config: TrainConfig) -> str | None:
    """Returns why the engine's pass is not for this machine or configuration."""
    reasons = {
        "the native kernels do not run here": not native.usable(),
        "it runs on one device: leave out fsdp": config.fsdp.enable_fsdp,
        "it drops nothing: set peft.lora_dropout to 0": config.training.use_peft and bool(config.peft.lora_dropout),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unsupported_layer(model: JaxModule, layers: AdaptedLayers | None) -> str | None:
    """Returns why the engine's pass is not for a layer of a model, or for one that gets an adapter."""
    for name, module in named_modules(model):
        is_known = not isinstance(module, HasCache) or isinstance(module.kv_cache_spec, KVCacheSpec | LatentCacheSpec)
        if not is_known or isinstance(module, HandsOnSelection):
            return f"the kernels of {name} ({type(module).__name__}) have no derivatives"
        if isinstance(module, JaxLmHead) and layers is not None and name in layers.sizes:
            return f"requests have no adapters of {name!r}: leave it out of peft.lora_target_modules"
    return None


class EnginePass(ForwardPass):
    """The engine's pass, on packed weights; see `ForwardPass`. Adapters have one place, as those of requests have."""

    is_packed: ClassVar[bool] = True

    def __init__(self, model: JaxModule, dtype: DTypeLike, layers: AdaptedLayers | None = None) -> None:
        if reason := _unsupported_layer(model, layers):
            raise _refusal(reason)
        self.scratch = ScratchCache(BLOCK_SIZE, jnp.dtype(dtype))
        self._layers, self._table_type = layers, table_type(dtype)
        self._additions = [] if layers is None else list(_added_to(model, layers, self._table_type))
        _, parameters, _ = nnx.split(model, nnx.Param, ...)
        by_name = {".".join(map(str, path)): cast(nnx.Param, param) for path, param in nnx.to_flat_state(parameters)}
        self._types = {} if layers else {name: param.get_value().dtype for name, param in by_name.items()}
        self._loaders = {
            name: loader
            for name, param in by_name.items()
            if isinstance(loader := param.get_metadata().get("weight_loader"), WeightLoader)
        }
        # Weights that the engine splits by heads.
        self._by_heads = {f"{n}.weight": m for n, m in named_modules(model) if isinstance(m, LatentUpProjection)}
        if layers is None:
            for layer in self._by_heads.values():
                layer.take_packed(None, None)
        self.model = FunctionalModel(model)

    def packed(self, trained: Mapping[str, jax.Array]) -> Values:
        """Packs trained weights, under names of their own.

        Raises ConfigError if the engine has a weight in a format whose products have no derivatives.
        """
        packed: dict[str, PackedWeight | jax.Array] = {}
        for name in trained.keys() & self._loaders.keys():
            weight = self._loaders[name].weight_of(trained[name])
            layer = self._by_heads.get(name)
            if isinstance(weight, PackedWeight) and layer is not None:
                # One type in all steps, so that programs are compiled once.
                heads = layer.packed_heads(weight, jnp.bfloat16 if weight.storage == "bfloat16" else jnp.float32)
                packed |= {_PACKED + part: each for part, each in zip(_parts_of_heads(name), heads, strict=True)}
            elif isinstance(weight, PackedWeight):
                packed[_PACKED + name] = weight
            elif not isinstance(weight, jax.Array | np.ndarray):
                raise _refusal(f"the engine has {name} as {weight.storage}, which is not packed")
        return packed

    def served(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        packed = {name.removeprefix(_PACKED): value for name, value in frozen.items() if name.startswith(_PACKED)}
        others = trained.keys() - packed.keys() - self._by_heads.keys()
        return {**frozen, **{name: trained[name].astype(self._types[name]) for name in others}, **packed}

    def with_weights(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the weights of `served`, where each packed weight also has the float array that gets its gradient."""
        values, masters = dict(self.served(trained, frozen)), dict(trained)
        for name, layer in self._by_heads.items():
            masters |= zip(_parts_of_heads(name), layer.by_heads(trained[name]), strict=True)
        for name, master in masters.items():
            if isinstance(weight := values.get(name), PackedWeight):
                values[name] = dataclasses.replace(weight, master=master)
        return values

    def with_adapters(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the weights and, under names of their own, the adapter's matrices in the engine's layout."""
        assert self._layers is not None
        tables = {}
        for name, place, addition in self._additions:
            a, b = self._layers.matrices(name, trained)
            entries = addition.entries(a, (jnp.float32(self._layers.scale) * b).T)
            tables |= {f"{place}.{table}": entry[None].astype(self._table_type) for table, entry in entries.items()}
        return {**frozen, **tables}

    def bind(self, values: Values) -> JaxModule:
        if self._layers is None:
            return self.model.bind(values)
        adapted = [place for _, place, _ in self._additions if f"{place}.a" in values]
        ranks = jnp.full(1, self._layers.params.lora_r, jnp.int32)
        [slots] = [name for name in self.model.other_names if name.endswith("addition.rows.slots")]
        others = {**values, **{f"{place}.ranks": ranks for place in adapted}}
        return self.model.bind(values, {**others, slots: jnp.full(1, bool(adapted), jnp.int32)})


def _added_to(
    model: JaxModule, layers: AdaptedLayers, dtype: DTypeLike
) -> Iterable[tuple[str, str, LowRankAddition | HeadwiseAddition]]:
    """Gives each adapted layer of a model its addition; yields the layer's name, the addition's, and the addition."""
    rows, modules, rank = StepRows(), dict(named_modules(model)), layers.params.lora_r
    for name, (size_in, size_out) in layers.sizes.items():
        layer = cast(JaxLinear, modules[name])
        if isinstance(layer, LatentUpProjection):
            sizes = layer.input_size, layer.key_dim, layer.value_dim, layer.num_heads
            layer.head_addition = HeadwiseAddition(1, rank, *sizes, rows, dtype)
            yield name, f"{name}.head_addition", layer.head_addition
        else:
            layer.addition = LowRankAddition(1, rank, size_in, size_out, rows, dtype)
            yield name, f"{name}.addition", layer.addition


def _parts_of_heads(name: str) -> tuple[str, str]:
    """Returns the names of the engine's two parameters for the weight of a `LatentUpProjection`."""
    layer = name.removesuffix(".weight")
    return f"{layer}.key_weight", f"{layer}.value_weight"


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"training.forward_pass='engine' cannot be honoured: {why}; or give plain")
