"""StarCoder and SantaCoder (arXiv:2305.06161): GPT-2 with one key-value head."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.qkv_packing import PACKED, PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import GPT2_NAMES, Family
from jaxis.models.common.gpt2 import Gpt2CausalLM, Gpt2DecoderLayer


class GPTBigCodeDecoderLayer(Gpt2DecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        is_multi_query = scope.config.get("multi_query", True)
        super().__init__(
            scope,
            num_kv_heads=1 if is_multi_query else None,
            packing=PACKED if is_multi_query else PACKED_BY_GROUP,
            default_activation="gelu_pytorch_tanh",
        )


class GPTBigCodeForCausalLM(Gpt2CausalLM):
    layer_class = GPTBigCodeDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.ignore("num_key_value_heads", because="multi_query says it")
        for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
            config.ignore(key, because="scores are in float32 anyway")


FAMILY = Family(
    "StarCoder, SantaCoder",
    (GPTBigCodeForCausalLM,),
    "learned positions, one key-value head, LayerNorm, biases",
    gguf=("starcoder",),
    names={"gpt_bigcode": GPT2_NAMES},
)
