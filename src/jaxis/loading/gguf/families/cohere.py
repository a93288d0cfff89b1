"""Command R and Command A."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, CLASSIC, ONE_BASE, windows
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Written, has, key
from jaxis.loading.gguf.tensor_names import ATTENTION, HEAD_NORMS, MLP, GGUFNames

_COHERE = (CLASSIC, rope(), key("logit_scale", "logit_scale", kind=float))

GGUFS = (
    GGUF(
        ("command-r", "cohere", "CohereForCausalLM"),
        (_COHERE, has("use_qk_norm", "attn_q_norm.weight"), ATTENTION_BIAS),
        GGUFNames(ATTENTION | HEAD_NORMS | MLP),
        written=Written(),
    ),
    GGUF(
        ("cohere2", "cohere2", "Cohere2ForCausalLM"),
        (_COHERE, windows(4), ONE_BASE),
        GGUFNames(ATTENTION | MLP),
        written=Written(window=True),
    ),
)
