"""Command R and Command A."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, CLASSIC, ONE_BASE, windows
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Written, has, key

_COHERE = (CLASSIC, rope(), key("logit_scale", "logit_scale", kind=float))

GGUFS = (
    GGUF(
        ("command-r", "cohere", "CohereForCausalLM"),
        (_COHERE, has("use_qk_norm", "attn_q_norm.weight"), ATTENTION_BIAS),
        written=Written(),
    ),
    GGUF(
        ("cohere2", "cohere2", "Cohere2ForCausalLM"),
        (_COHERE, windows(4), ONE_BASE),
        written=Written(window=True),
    ),
)
