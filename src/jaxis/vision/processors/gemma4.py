"""Gemma 4's images: in their own proportions, with at most as many tokens as the file says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, PixelScale

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE, _START, _END = 258_880, 255_999, 258_882


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(ImageProcessor):
    """An image is as large as its tokens allow, and stands between a token that begins it and one that ends it.

    Attributes:
      max_tokens: Of an image.
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of what becomes one token.
      start_id, end_id: The tokens around an image.
    """

    max_tokens: int
    patch_size: int
    merge_size: int
    start_id: int
    end_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Gemma4Processor:
        """Reads the settings of Gemma 4.

        Raises:
          ConfigError: A setting is missing or not supported.
        """
        # What the reference does in the model.
        return cls._read(settings, tokenizer, HALF_SCALE.mean, HALF_SCALE.std)

    @classmethod
    def read_unified(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Gemma4Processor:
        """Reads the settings of the 12B, whose pixels are from 0 to 1.

        Raises:
          ConfigError: A setting is missing or not supported.
        """
        return cls._read(settings, tokenizer, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

    @classmethod
    def _read(
        cls, settings: ProcessorSettings, tokenizer: Tokenizer, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Gemma4Processor:
        settings.check("do_normalize", "max_soft_tokens", "pooling_kernel_size")
        if settings.image("do_normalize", False):
            raise ConfigError(f"{settings.source}: the image processor has do_normalize, which is not supported")
        text, model = settings.model.get("text_config") or {}, settings.model
        image_id = model.get("image_token_id", _IMAGE)
        return cls(
            pixel_scale=PixelScale(settings.image("rescale_factor", 1 / 255), mean, std),
            resample=settings.image("resample", 3),
            placeholder=tokenizer.token_text(image_id),
            placeholder_id=image_id,
            is_bidirectional=text.get("use_bidirectional_attention") == "vision",
            max_tokens=settings.image("max_soft_tokens", 280),
            patch_size=settings.image("patch_size", 16),
            merge_size=settings.image("pooling_kernel_size", 3),
            start_id=model.get("boi_token_id", _START),
            end_id=model.get("eoi_token_id", _END),
        )

    @property
    def most_tokens(self) -> int:
        """See `ImageProcessor`."""
        return self.max_tokens

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """The width and height that an image is resized to."""
        side = self.patch_size * self.merge_size
        factor = math.sqrt(self.max_tokens * side**2 / (height * width))
        columns, rows = math.floor(factor * width / side), math.floor(factor * height / side)
        if rows == 0:
            columns, rows = min(width // height, self.max_tokens), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.max_tokens)
        return columns * side, rows * side

    def views(self, image: Image) -> np.ndarray:
        """See `ImageProcessor`."""
        return np.asarray(self.resized(image, *self.target_size(*image.size)))[None]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`."""
        columns, rows = self.target_size(width, height)
        count = columns * rows // (self.patch_size * self.merge_size) ** 2
        return [self.placeholder_id] * count, list(range(count))

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`; the tokens around an image are none of those that see each other."""
        del text
        image = (self.start_id, self.placeholder_id, self.end_id)
        spelled = [each for i in token_ids for each in (image if i == self.placeholder_id else (i,))]
        return spelled, [i for i, token_id in enumerate(spelled) if token_id == self.placeholder_id]
