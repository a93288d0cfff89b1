"""Arguments of images and videos."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxis.engine.argument_groups.info import ArgumentGroup, argument
from jaxis.errors import ConfigError

VisionQuantization = Literal["int8"]


@dataclass(frozen=True)
class VisionArguments(ArgumentGroup):
    """The vision tower, and the most images of a prompt."""

    mmproj: str | os.PathLike[str] | None = argument(
        None,
        description=(
            "The vision part of a model in GGUF: its `mmproj` file. None: the one that lies beside the model's "
            "file, if there is one. See [images](images.md#gguf-models)."
        ),
        documented_default="the file beside the model's",
        metavar="FILE",
        help="The vision part of a GGUF model (mmproj file). Default: the one beside the model's file.",
    )
    vision_quantization: VisionQuantization | None = argument(
        None,
        description=(
            'Low-precision weights of the vision tower: "int8", as in `quantization`. None: as in `dtype`. See '
            "[images](images.md#how-it-runs)."
        ),
        metavar="NAME",
        help="Low-precision weights of the vision tower: int8.",
    )
    limit_mm_per_prompt: Mapping[str, int] | None = argument(
        None,
        description=(
            'Most images and videos of a prompt: `{"image": 32, "video": 32}`, which None and what is not named '
            "are. With 0 of all that the model takes, no vision tower is loaded. See [images](images.md)."
        ),
        documented_default='`{"image": 32, "video": 32}`',
        metavar="JSON",
        help='Most of a prompt, \'{"image": 8, "video": 1}\'; with 0 of both, no vision tower.',
        speed_only=True,
    )

    def check(self) -> None:
        if self.vision_quantization not in (None, "int8"):
            raise ConfigError(f'vision_quantization={self.vision_quantization!r} must be "int8" or None')
        limits = self.limit_mm_per_prompt or {}
        is_limits = isinstance(limits, Mapping) and not set(limits) - {"image", "video"}
        if not is_limits or not all(type(limit) is int and limit >= 0 for limit in limits.values()):
            raise ConfigError(
                f"limit_mm_per_prompt={self.limit_mm_per_prompt!r} must be the most images and videos of a prompt: "
                '{"image": 8, "video": 1}'
            )
