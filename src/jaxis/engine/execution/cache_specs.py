"""The specs of the caches of a model's layers: one spec for each layer that caches something of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxis.errors import ConfigError
from jaxis.layers.kv_cache_spec import CacheSpec, HasCache, KVCacheSpec
from jaxis.layers.module import named_modules
from jaxis.layers.state_cache_spec import HasState, StateCacheSpec
from jaxis.models.common.interfaces import DRAFT_PREFIX, draft_of

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


def cache_specs(model: JaxModule, vllm_config: VllmConfig) -> list[CacheSpec | StateCacheSpec]:
    """Returns one spec per layer that caches: from its module, or from config.json if no module is jaxis's."""
    if specs := own_cache_specs(model):
        return specs
    config = vllm_config.model_config.hf_config.get_text_config()
    num_heads = config["num_attention_heads"]
    spec = KVCacheSpec(
        config.get("num_key_value_heads") or num_heads,
        config.get("head_dim") or config["hidden_size"] // num_heads,
        num_heads=num_heads,
    )
    return [spec] * config["num_hidden_layers"]


def own_cache_specs(model: JaxModule) -> list[CacheSpec | StateCacheSpec]:
    """Returns one spec for each of jaxis's modules that cache, in their order; specs of draft layers come last."""
    specs: list[CacheSpec | StateCacheSpec] = []
    for _, module in sorted(named_modules(model), key=lambda named: named[0].startswith(DRAFT_PREFIX)):
        if isinstance(module, HasCache):
            specs.append(module.kv_cache_spec)
        elif isinstance(module, HasState):
            specs.append(module.state_cache_spec)
    return specs


def num_draft_caches(model: JaxModule) -> int:
    """Returns the number of draft layers' specs, which are the last ones of `cache_specs`.

    Raises:
      ConfigError: Some draft layers have a recurrent state, which cannot be rolled back when drafts are wrong.
    """
    layers = draft_of(model)
    if layers is None:
        return 0
    modules = [module for _, module in named_modules(layers)]
    if any(isinstance(module, HasState) for module in modules):
        raise ConfigError(
            "speculative_config: what is to draft has recurrent layers, whose states are not rolled back when its "
            "drafts are wrong: draft with another model, or with method ngram"
        )
    return sum(isinstance(module, HasCache) for module in modules)


def kv_cache_specs(model: JaxModule, vllm_config: VllmConfig) -> list[CacheSpec]:
    """Returns the specs of the layers that cache something for each token."""
    return [spec for spec in cache_specs(model, vllm_config) if not isinstance(spec, StateCacheSpec)]
