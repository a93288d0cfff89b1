"""Code shared by OLMo 2 and later: attention with one norm over all query heads and one over all key heads."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.rope_config import RopeConfig
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.scope import LayerScope


def olmo_attention(
    scope: LayerScope,
    *,
    use_rope: bool = True,
    rope_settings: RopeConfig | None = None,
    span: AttentionSpan = FULL_CONTEXT,
) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        scope,
        use_rope=use_rope,
        rope_settings=rope_settings,
        use_bias=scope.config.get("attention_bias", False),
        qk_norm=lambda heads, head_dim: rms_norm(scope, heads * head_dim),
        span=span,
    )
