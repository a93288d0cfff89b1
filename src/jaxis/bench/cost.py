"""Lower bounds of a model's steps: the bytes that a decode step reads and the arithmetic of a prefill.

The roofline of https://jax-ml.github.io/scaling-book/inference: a decode step takes at least the bytes of
its weights and context divided by memory bandwidth, a prefill at least its operations divided by peak FLOPS.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxis.config.expert_counts import experts_per_token, num_experts
from jaxis.layers.indexer import IndexKeyCache
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.module import named_modules, named_parameters
from jaxis.models.common.looped import runs_of_weights
from jaxis.models.model_loader import construct_model
from jaxis.models.registry import model_class_of

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.engine.engine import LLMEngine

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
EXPERTS = ".experts."


@dataclass(frozen=True)
class DecodeCost:
    """The bytes that a decode step reads: all of `weight_bytes`, and of the experts those that its tokens are routed
    to.

    Attributes:
      kv_bytes_per_token: Bytes of keys and values of one token of one request, in all layers.
      expert_share: Share of a layer's experts that one token is routed to.
      state_bytes: Bytes of recurrent states of one request, in all layers; a step reads and writes them.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    expert_bytes: int = 0
    expert_share: float = 0.0
    state_bytes: int = 0

    def step_weight_bytes(self, batch_size: int) -> int:
        """Returns the bytes of weights that a step of `batch_size` requests reads.

        With experts, this is the average if each token's experts are chosen at random.
        """
        share_hit = 1 - (1 - self.expert_share) ** batch_size
        return self.weight_bytes + round(self.expert_bytes * share_hit)

    def step_bytes(self, batch_size: int, context_len: float) -> float:
        """Returns the bytes that a step of `batch_size` requests moves, each attending to `context_len` tokens."""
        per_request = context_len * self.kv_bytes_per_token + 2 * self.state_bytes
        return self.step_weight_bytes(batch_size) + batch_size * per_request

    def held_bytes(self, num_tokens: int) -> int:
        return self.weight_bytes + self.expert_bytes + num_tokens * self.kv_bytes_per_token


@dataclass(frozen=True)
class PrefillCost:
    """The arithmetic of a model with full attention.

    Attributes:
      layer_params: Parameters of all layers that multiply a token, counting only the experts that it is routed to.
      head_params: Parameters of the output head, which multiply only tokens that are sampled from.
      attention_flops_per_key: Operations per query and key-value pair, in all layers and heads.
    """

    layer_params: int
    head_params: int
    attention_flops_per_key: int

    def flops(self, batch_size: int, input_len: int) -> int:
        """Counts the operations of a prefill of `batch_size` prompts of `input_len` tokens, with causal attention."""
        num_keys = input_len * (input_len + 1) // 2
        products = 2 * (self.layer_params * input_len + self.head_params)
        return batch_size * (products + self.attention_flops_per_key * num_keys)


def decode_cost(engine: LLMEngine) -> DecodeCost:
    """Computes the decode cost of the engine's model, with weights and cache as they are in memory."""
    bytes_per_block = sum(engine.runner.kv_bytes_per_block.values())
    block_size = engine.vllm_config.cache_config.block_size
    share = expert_share(engine.vllm_config.model_config.hf_config.get_text_config())
    runs = runs_of_weights(engine.runner.model)
    weight_bytes = {name: size * runs.get(name, 1) for name, size in engine.runner.bytes_by_weight().items()}
    cost = decode_cost_of(weight_bytes, bytes_per_block // block_size, share)
    return dataclasses.replace(cost, state_bytes=engine.runner.bytes_per_state_slot)


def decode_cost_of(
    weight_bytes: Mapping[str, int], kv_bytes_per_token: int, share_of_experts: float = 0.0
) -> DecodeCost:
    """Computes the decode cost of a model from its weights' bytes by name and the result of `expert_share`."""
    of_experts = {name: size for name, size in weight_bytes.items() if EXPERTS in name}
    others = {name: size for name, size in weight_bytes.items() if name not in of_experts}
    return DecodeCost(bytes_read(others), kv_bytes_per_token, sum(of_experts.values()), share_of_experts)


def expert_share(config: Mapping[str, Any] | HFConfig) -> float:
    """Returns the share of a layer's experts that a token is routed to, from config.json; 0 without experts."""
    count = num_experts(config)
    return experts_per_token(config) / count if count else 0.0


def prefill_cost(vllm_config: VllmConfig) -> PrefillCost:
    """Computes the prefill cost of the configured model; quantization does not change it."""
    hf_config = vllm_config.model_config.hf_config
    text_config = hf_config.get_text_config()
    plain = dataclasses.replace(vllm_config, quant_config=None)
    model_class = model_class_of(hf_config)
    model = nnx.eval_shape(lambda: construct_model(model_class, plain))
    shapes = {name: param.get_value().shape for name, param in named_parameters(model)}
    share = expert_share(text_config)
    # A model of one's own may have attention of its own, in every layer. An indexer's keys are beside a layer's cache.
    modules = [module for _, module in named_modules(model)]
    runs = runs_of_weights(model)
    num_attending = sum(isinstance(m, HasCache) and not isinstance(m, IndexKeyCache) for m in modules)
    num_attending = num_attending or text_config["num_hidden_layers"]
    return PrefillCost(
        layer_params=sum(
            round(math.prod(shape) * (share if EXPERTS in name else 1)) * runs.get(name, 1)
            for name, shape in shapes.items()
            if len(shape) > 1 and EMBEDDING not in name and HEAD not in name
        ),
        head_params=text_config["vocab_size"] * text_config["hidden_size"],
        attention_flops_per_key=2 * _numbers_per_key(text_config) * num_attending,
    )


def _numbers_per_key(config: HFConfig) -> int:
    """Counts the elements of a key and its value, in all heads; latent attention's are expanded, not absorbed."""
    num_heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        return num_heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"])
    return 2 * num_heads * (config.get("head_dim") or config["hidden_size"] // num_heads)


def bytes_read(weight_bytes: Mapping[str, int]) -> int:
    """Counts the bytes that a step reads of the named weights: of an untied embedding table, only a few rows."""
    has_head = any(HEAD in name for name in weight_bytes)
    return sum(size for name, size in weight_bytes.items() if not (has_head and EMBEDDING in name))
