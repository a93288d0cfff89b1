"""Images of Pixtral and of models with its tower: in their own aspect ratio, as rows of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_LIGHTON_IMAGE = 151_655


@dataclass(frozen=True, kw_only=True)
class PixtralProcessor(ImageProcessor):
    """Sides are multiples of a merged patch; a token may end each row of patches.

    Attributes:
      longest_edge: Largest side in pixels; larger images are shrunk in proportion.
      patch_size: Pixels of a side of a merged patch.
      break_id, end_id: Tokens after a row, and after the last row; None for none.
    """

    longest_edge: int
    patch_size: int
    break_id: int | None = None
    end_id: int | None = None

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> PixtralProcessor:
        """Reads the settings of Pixtral and Mistral 3."""
        names = ("image_token", "image_break_token", "image_end_token")
        tokens = [settings.processor.get(name, default) for name, default in zip(names, _TOKENS, strict=True)]
        image_id, break_id, end_id = (settings.token_id(token, tokenizer) for token in tokens)
        patch_size = settings.processor.get("patch_size", 16) * settings.processor.get("spatial_merge_size", 1)
        return cls(
            **_pixels(settings, patch_size),
            placeholder_id=image_id,
            break_id=break_id,
            end_id=end_id,
            placeholder=tokens[0],
        )

    @classmethod
    def read_lighton_ocr(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> PixtralProcessor:
        """Reads the settings of LightOnOCR, whose images are placeholders alone."""
        patch_size = settings.processor.get("patch_size", 14) * settings.processor.get("spatial_merge_size", 2)
        of_images = settings.image("patch_size", {"height": 16, "width": 16})
        if of_images not in (patch_size, {"height": patch_size, "width": patch_size}):
            raise ConfigError(
                f"{settings.source}: images are resized to patches of {of_images}, and the tower's merged ones have "
                f"{patch_size} pixels: correct the files"
            )
        token_id = settings.model.get("image_token_id", _LIGHTON_IMAGE)
        return cls(**_pixels(settings, patch_size), placeholder_id=token_id, placeholder=tokenizer.token_text(token_id))

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height after resizing."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            # A short side of a very long image must not round to 0.
            width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
        patch = self.patch_size
        return -(-width // patch) * patch, -(-height // patch) * patch

    def views(self, image: Image) -> np.ndarray:
        return np.asarray(self.resized(image, *self.target_size(*image.size)))[None]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = (side // self.patch_size for side in self.target_size(width, height))
        if self.break_id is None or self.end_id is None:
            return [self.placeholder_id] * (columns * rows), list(range(columns * rows))
        token_ids = ([self.placeholder_id] * columns + [self.break_id]) * rows
        token_ids[-1] = self.end_id
        return token_ids, [i for i in range(len(token_ids)) if (i + 1) % (columns + 1)]


def _pixels(settings: ProcessorSettings, patch_size: int) -> dict[str, Any]:
    """Returns the fields about pixels, given the size of a merged patch."""
    settings.check()
    return {
        "pixel_scale": settings.scale(CLIP_SCALE),
        "longest_edge": settings.size("size", "longest_edge", 1024),
        "patch_size": patch_size,
        "resample": settings.image("resample", 3),
    }
