"""Keys and values of a GGUF model's config that no config.json has."""

from __future__ import annotations

QUANT_METHOD = "gguf"
"""Value of `quant_method` in `quantization_config`."""
POOLING_MODE = "gguf_pooling_mode"
"""Key of the config for the hidden states that are pooled: "mean", "cls" or "last"."""
DENSE_SIZES = "gguf_dense_sizes"
"""Key of the config with the (input, output) features of Dense modules, by the names of their tensors."""
