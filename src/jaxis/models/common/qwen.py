"""Code shared by Qwen2 and Qwen3: which layers have a sliding window."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.layers.scope import LayerScope


def qwen_layer_span(scope: LayerScope) -> AttentionSpan:
    """The layer's attention span.

    `use_sliding_window` enables windows in the layers that `layer_types` lists or, without that list, in those from
    `max_window_layers` on.

    Args:
      scope: The decoder layer's scope.

    Raises:
      ConfigError: `layer_types` has no known type for the layer.
    """
    config = scope.config
    config.ignore("max_window_layers", because="it matters only with use_sliding_window and without layer_types")
    config.ignore("sliding_window", because="only layers with a window use it")
    kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
    if not config.get("use_sliding_window", False):
        return FULL_CONTEXT
    if kind is None:
        has_window = scope.layer_index >= config.get("max_window_layers", 28)
    else:
        has_window = kind == SLIDING_ATTENTION
    return AttentionSpan(config.get("sliding_window", 4096)) if has_window else FULL_CONTEXT
