"""The forward pass of the engine as training differentiates it: its kernels, its sums, and adapters as it applies them.

The log-probabilities that training sees then are, to the last bit, those that the engine returns when it samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels import native
from jaxis.layers.addition import LowRankAddition, StepRows
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.experts import JaxExperts
from jaxis.layers.kv_cache_spec import HandsOnSelection, HasCache, HasState, KVCacheSpec
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.lora.adapted_model import table_type
from jaxis.training.adapters import AdaptedLayers
from jaxis.training.config import TrainConfig
from jaxis.training.functional_model import FunctionalModel, Values
from jaxis.training.objectives import Forward, make_forward

BLOCK_SIZE = 16


def check_engine_forward(config: TrainConfig) -> None:
    """Checks that the engine's forward pass can train what a configuration asks for.

    Raises:
      ConfigError: It cannot.
    """
    reasons = {
        "the native kernels do not run here": not native.usable(),
        "it trains adapters only: set training.use_peft": not config.training.use_peft,
        "it runs on one device: leave out fsdp": config.fsdp.enable_fsdp,
        "it drops nothing: set peft.lora_dropout to 0": bool(config.peft.lora_dropout),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"training.forward_pass='engine' cannot be honoured: {reason}; or give plain")


def _check_layers(model: JaxModule) -> None:
    """Checks that the engine's kernels for all layers can be differentiated.

    Raises:
      ConfigError: Some cannot.
    """
    for name, module in named_modules(model):
        is_known = isinstance(module.kv_cache_spec, KVCacheSpec) if isinstance(module, HasCache) else True
        if not is_known or isinstance(module, HasState | HandsOnSelection | JaxExperts):
            raise ConfigError(
                f"training.forward_pass='engine' cannot be honoured: the kernels of {name} ({type(module).__name__}) "
                "have no derivatives; give plain"
            )


class EngineAdapters:
    """A model for the native kernels with a place for one adapter.

    Args:
      model: The model, packed.
      layers: What gets adapters.
      dtype: What the model computes in.

    Raises:
      ConfigError: The engine has no adapters in one of the layers.
    """

    def __init__(self, model: JaxModule, layers: AdaptedLayers, dtype: DTypeLike) -> None:
        _check_layers(model)
        self._layers, self._dtype = layers, table_type(dtype)
        self._scratch = ScratchCache(BLOCK_SIZE, jnp.dtype(dtype))
        rows, modules, rank = StepRows(), dict(named_modules(model)), layers.params.lora_r
        for name, (size_in, size_out) in layers.sizes.items():
            layer = cast(JaxLinear, modules[name])
            if isinstance(layer, JaxLmHead):
                raise ConfigError(
                    f"training.forward_pass='engine' cannot be honoured: requests have no adapters of {name!r}; give "
                    "plain, or leave it out of peft.lora_target_modules"
                )
            layer.addition = LowRankAddition(1, rank, size_in, size_out, rows, self._dtype)
        self._model = FunctionalModel(model)
        [self._slots] = [name for name in self._model.other_names if name.endswith(".addition.rows.slots")]

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """The model's weights and, under names of their own, the adapter's matrices as the engine has them."""
        tables = {}
        for name in self._layers.sizes:
            a, b = self._layers.matrices(name, trained)
            tables[f"{name}.addition.a"] = a[None].astype(self._dtype)
            tables[f"{name}.addition.b"] = (jnp.float32(self._layers.scale) * b).T[None].astype(self._dtype)
        return {**frozen, **tables}

    def forward(self, *, recompute: bool) -> Forward:
        """The scores of what `combine` returns, or of weights alone."""
        return make_forward(
            self._model, lambda values, _: self.bind(values), recompute=recompute, scratch=self._scratch
        )

    def bind(self, values: Values) -> JaxModule:
        """The model with what `combine` returns, or with weights alone."""
        adapted = [name for name in self._layers.sizes if f"{name}.addition.a" in values]
        tables = {f"{name}.addition.{table}": values[f"{name}.addition.{table}"] for name in adapted for table in "ab"}
        ranks = jnp.full(1, self._layers.params.lora_r, jnp.int32)
        ranks_of = {f"{name}.addition.ranks": ranks for name in adapted}
        return self._model.bind(values, {**tables, **ranks_of, self._slots: jnp.full(1, bool(adapted), jnp.int32)})
