from __future__ import annotations

from jaxis.layers.scope import LayerScope


def has_rope(scope: LayerScope) -> bool:
    """True if the decoder layer has a rope: 1 in `no_rope_layers`, despite its name; an empty list counts as absent."""
    scope.config.ignore("no_rope_layer_interval", because="no_rope_layers, where there is one, says it of each layer")
    if layers := scope.config.get("no_rope_layers"):
        return bool(layers[scope.layer_index])
    return (scope.layer_index + 1) % scope.config.get("no_rope_layer_interval", 4) != 0
