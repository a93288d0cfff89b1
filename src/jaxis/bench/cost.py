"""What a model's steps cost at least: the bytes that a decode step reads, the arithmetic of a prefill.

The roofline of https://jax-ml.github.io/scaling-book/inference: a decode step takes no less than its weights' and
context's bytes over the memory's speed, a prefill no less than its operations over the arithmetic's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.module import named_parameters
from jaxis.loading.model_loader import construct_model
from jaxis.models.registry import get_model_class

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.engine import LLMEngine

EMBEDDING = "embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True)
class DecodeCost:
    """What a decode step reads.

    Attributes:
      weight_bytes: Weights that every step reads, as they are in memory.
      kv_bytes_per_token: Keys and values of one token of one request, in all layers.
    """

    weight_bytes: int
    kv_bytes_per_token: int

    def step_bytes(self, batch_size: int, context_len: float) -> float:
        """Bytes that a step of `batch_size` requests reads, each attending to `context_len` tokens."""
        return self.weight_bytes + batch_size * context_len * self.kv_bytes_per_token


@dataclass(frozen=True)
class PrefillCost:
    """What a dense model with full attention computes.

    Attributes:
      layer_params: Parameters that multiply every token: those of all layers' products.
      head_params: Parameters of the output head, which multiply only the tokens that sample.
      attention_flops_per_key: Operations of one query with one key and its value, in all layers and heads.
    """

    layer_params: int
    head_params: int
    attention_flops_per_key: int

    def flops(self, batch_size: int, input_len: int) -> int:
        """Operations from `batch_size` prompts of `input_len` tokens to a first token each, attention causal."""
        num_keys = input_len * (input_len + 1) // 2
        products = 2 * (self.layer_params * input_len + self.head_params)
        return batch_size * (products + self.attention_flops_per_key * num_keys)


def decode_cost(engine: LLMEngine) -> DecodeCost:
    """The cost of the engine's model, weights and cache as they are in memory."""
    bytes_per_block = sum(engine.runner.kv_bytes_per_block.values())
    block_size = engine.vllm_config.cache_config.block_size
    return DecodeCost(bytes_read(engine.runner.bytes_by_weight()), bytes_per_block // block_size)


def prefill_cost(vllm_config: VllmConfig) -> PrefillCost:
    """The cost of the configured model; quantization does not change it."""
    hf_config = vllm_config.model_config.hf_config
    text_config = hf_config.get_text_config()
    plain = dataclasses.replace(vllm_config, quant_config=None)
    model_class = get_model_class(list(hf_config["architectures"]))
    model = nnx.eval_shape(lambda: construct_model(model_class, plain))
    shapes = {name: param.get_value().shape for name, param in named_parameters(model)}
    num_heads = text_config["num_attention_heads"]
    head_dim = text_config.get("head_dim") or text_config["hidden_size"] // num_heads
    return PrefillCost(
        layer_params=sum(
            math.prod(shape)
            for name, shape in shapes.items()
            if len(shape) > 1 and EMBEDDING not in name and HEAD not in name
        ),
        head_params=text_config["vocab_size"] * text_config["hidden_size"],
        attention_flops_per_key=4 * num_heads * head_dim * text_config["num_hidden_layers"],
    )


def bytes_read(weight_bytes: Mapping[str, int]) -> int:
    """Bytes that a step reads of weights given by name.

    Of an embedding table that is not the output head too, a step reads a few rows only.
    """
    has_head = any(HEAD in name for name in weight_bytes)
    return sum(size for name, size in weight_bytes.items() if not (has_head and EMBEDDING in name))
