"""Names of tensors in MLX's files, whose metadata say `format: mlx`.

They are Hugging Face's, but for the experts of a mixture, which mlx-lm stacks: `mlp.switch_mlp.gate_proj.weight` has
those of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_mlx(metadata: Mapping[str, str]) -> bool:
    """Whether a file with this metadata is MLX's."""
    return metadata.get("format") == "mlx"


def hugging_face_name(name: str) -> str:
    """The tensor's name without what is MLX's own."""
    return name.replace(".switch_mlp.", ".experts.")
