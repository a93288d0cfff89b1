"""Images of Kimi K2.5 to K2.7: patches in the image's aspect ratio, shrunk only if there are too many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import HALF_SCALE, PixelScale, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<|media_pad|>"


@dataclass(frozen=True, kw_only=True)
class KimiProcessor(ImageProcessor):
    """An image is its placeholders alone; the template writes the tokens around them.

    Attributes:
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of the square that becomes one token.
      max_patches: Largest number of patches, approximately.
      max_side: Largest number of patches of a side.
    """

    patch_size: int
    merge_size: int
    max_patches: int
    max_side: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> KimiProcessor:
        """Reads the settings of the published files, or of files that transformers writes."""
        settings.check("media_proc_cfg", "max_patches", "merge_size", "patch_size")
        published = settings.image("media_proc_cfg", {})
        if published.get("fixed_output_tokens") is not None:
            raise ConfigError(f"{settings.source}: the image processor has fixed_output_tokens, which is not supported")
        side = settings.image("size", {"max_height": 512, "max_width": 512})
        if side.get("max_height") != side.get("max_width") or not side.get("max_height"):
            raise ConfigError(f"{settings.source} has size={side!r}; expected one number of patches for both sides")
        scale = settings.scale(HALF_SCALE)
        mean, std = published.get("image_mean", scale.mean), published.get("image_std", scale.std)
        return cls(
            pixel_scale=PixelScale(scale.factor, tuple(mean), tuple(std)),
            resample=settings.image("resample", 3),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            patch_size=published.get("patch_size", settings.image("patch_size", 14)),
            merge_size=published.get("merge_kernel_size", settings.image("merge_size", 2)),
            max_patches=published.get("in_patch_limit", settings.image("max_patches", 16_384)),
            max_side=published.get("patch_limit_on_one_side", side["max_height"]),
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height after resizing, before padding to whole patches."""
        patch, most = self.patch_size, self.max_side * self.patch_size
        num_patches = max(height // patch, 1) * max(width // patch, 1)
        scale = min(1.0, math.sqrt(self.max_patches / num_patches), most / height, most / width)
        columns, rows = (min(max(int(each * scale), 1), most) for each in (width, height))
        return columns, rows

    def views(self, image: Image) -> np.ndarray:
        size = self.target_size(*image.size)
        side = self.patch_size * self.merge_size
        columns, rows = (-(-each // side) * side for each in size)
        view = np.zeros((1, rows, columns, 3), np.uint8)
        view[0, : size[1], : size[0]] = np.asarray(self.resized(image, *size))
        return view

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        side = self.patch_size * self.merge_size
        count = math.prod(-(-each // side) for each in self.target_size(width, height))
        return [self.placeholder_id] * count, list(range(count))
