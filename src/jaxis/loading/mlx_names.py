"""Names of tensors in MLX's files, whose metadata say `format: mlx`.

They are Hugging Face's names, except for the experts of a mixture. mlx-lm stacks these:
`mlp.switch_mlp.gate_proj.weight` has the weights of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_mlx(metadata: Mapping[str, str]) -> bool:
    """Returns whether a file with this metadata is MLX's."""
    return metadata.get("format") == "mlx"


def hugging_face_name(name: str) -> str:
    """Returns Hugging Face's name of MLX's tensor."""
    return name.replace(".switch_mlp.", ".experts.")
