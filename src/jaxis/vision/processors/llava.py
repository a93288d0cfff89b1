"""Images of LLaVA 1.5: squares of one size, center-cropped or stretched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, whole_patches

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<image>"


@dataclass(frozen=True, kw_only=True)
class LlavaProcessor(ImageProcessor):
    """An image is its placeholders alone.

    Attributes:
      size: Pixels of a side.
      is_cropped: True to cut off both ends of the longer side, False to stretch.
      patch_size: Pixels of a side of a patch.
    """

    size: int
    is_cropped: bool
    patch_size: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> LlavaProcessor:
        """Reads the settings of LLaVA 1.5."""
        settings.check("do_center_crop", "crop_size")
        is_cropped = settings.image("do_center_crop", False)
        size = settings.size("size", "shortest_edge", 224) if is_cropped else settings.square(224)
        crop = settings.image("crop_size", None)
        if is_cropped and crop not in (None, size, {"height": size, "width": size}):
            raise ConfigError(f"{settings.source} cuts {crop!r} out of images of {size} pixels; expected that size")
        if settings.image("do_pad", False):
            raise ConfigError(f"{settings.source}: the image processor has do_pad, which is not supported")
        vision = settings.model.get("vision_config") or {}
        patch_size = settings.processor.get("patch_size") or vision.get("patch_size", 14)
        token = settings.processor.get("image_token", _IMAGE)
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=token,
            placeholder_id=settings.token_id(token, tokenizer),
            size=size,
            is_cropped=is_cropped,
            patch_size=patch_size,
        )

    def views(self, image: Image) -> np.ndarray:
        if not self.is_cropped:
            return whole_patches(np.asarray(self.resized(image, self.size, self.size))[None], self.patch_size)
        short, long = sorted(image.size)
        long = int(self.size * long / short)
        width, height = (self.size, long) if image.size[0] <= image.size[1] else (long, self.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        pixels = np.asarray(self.resized(image, width, height))
        return whole_patches(pixels[None, top : top + self.size, left : left + self.size], self.patch_size)

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        del width, height
        count = (self.size // self.patch_size) ** 2
        return [self.placeholder_id] * count, list(range(count))
