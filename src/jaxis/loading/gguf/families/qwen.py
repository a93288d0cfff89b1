"""Qwen 2 and 3, with and without experts, and the text parts of their vision models."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    EXPERT_WIDTH,
    SHARED_EXPERT_WIDTH,
    SOFTMAX,
    experts,
    usual,
)
from jaxis.loading.gguf.rope_keys import mrope
from jaxis.loading.gguf.table import GGUF, Written, constant, key, only, unused

_QWEN3 = (usual(), ATTENTION_BIAS)
_QWEN3_MOE = (
    _QWEN3,
    experts("num_experts"),
    EXPERT_WIDTH,
    key("norm_topk_prob", "expert_weights_norm", True, bool, is_assumed=True),
    only("expert_gating_func", SOFTMAX),
)
_VL = (mrope(interleaved=True), unused("n_deepstack_layers"))  # as many as the vision part makes

GGUFS = (
    GGUF(("qwen2", "qwen2", "Qwen2ForCausalLM"), usual(), written=Written(biases=True)),
    GGUF(("qwen2vl", "qwen2", "Qwen2ForCausalLM"), (usual(), mrope(interleaved=False))),
    GGUF(("qwen3", "qwen3", "Qwen3ForCausalLM"), _QWEN3, written=Written()),
    GGUF(("qwen3vl", "qwen3", "Qwen3ForCausalLM"), (_QWEN3, _VL)),
    GGUF(("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"), _QWEN3_MOE, written=Written()),
    GGUF(("qwen3vlmoe", "qwen3_moe", "Qwen3MoeForCausalLM"), (_QWEN3_MOE, _VL)),
    # Qwen1.5 and 2, whose every layer has experts.
    GGUF(
        ("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM"),
        (
            [usual(), experts("num_experts"), EXPERT_WIDTH, SHARED_EXPERT_WIDTH],
            constant("norm_topk_prob", False, is_assumed=True),
        ),
    ),
)
