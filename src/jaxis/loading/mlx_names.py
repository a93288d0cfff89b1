"""Names of tensors in MLX's files, whose metadata say `format: mlx`.

They are Hugging Face's, except for stacked experts: `mlp.switch_mlp.gate_proj.weight` has the weights of all.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_mlx(metadata: Mapping[str, str]) -> bool:
    return metadata.get("format") == "mlx"


def hugging_face_name(name: str) -> str:
    return name.replace(".switch_mlp.", ".experts.")
