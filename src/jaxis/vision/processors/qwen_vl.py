"""Images of Qwen2-VL and later: in their own proportions, whose places RoPE counts by row and column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.processor import ImageProcessor, size_within
from jaxis.vision.processors.settings import CLIP_SCALE, ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<|image_pad|>"


@dataclass(frozen=True, kw_only=True)
class QwenVLProcessor(ImageProcessor):
    """Sides are multiples of a merged patch, and images have a number of pixels between two bounds.

    Attributes:
      side: Pixels of a side of a merged patch.
      min_pixels, max_pixels: Of an image.
    """

    side: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> QwenVLProcessor:
        """Reads the settings of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

        Raises:
          ConfigError: A setting is missing or not supported.
        """
        settings.check("min_pixels", "max_pixels", "temporal_patch_size", "merge_size")
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            side=settings.image("patch_size", 14) * settings.image("merge_size", 2),
            min_pixels=settings.image("min_pixels", None) or settings.size("size", "shortest_edge", 56 * 56),
            max_pixels=settings.image("max_pixels", None) or settings.size("size", "longest_edge", 28 * 28 * 1280),
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """The width and height that an image is resized to."""
        return size_within((width, height), self.side, self.min_pixels, self.max_pixels)

    def views(self, image: Image) -> np.ndarray:
        """See `ImageProcessor`."""
        return np.asarray(self.resized(image, *self.target_size(*image.size)))[None]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """See `ImageProcessor`."""
        width, height = self.target_size(width, height)
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`."""
        count = math.prod(self.grid(width, height))
        return [self.placeholder_id] * count, list(range(count))
