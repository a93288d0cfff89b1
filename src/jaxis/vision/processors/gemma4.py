"""Gemma 4's images: in their own aspect ratio, with a limited number of tokens."""

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
    """An image is as large as its tokens allow, and lies between a start and an end token.

    Attributes:
      max_tokens: Largest number of tokens of an image.
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of the square that becomes one token.
      start_id, end_id: Tokens around an image.
    """

    max_tokens: int
    patch_size: int
    merge_size: int
    start_id: int
    end_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Gemma4Processor:
        """Reads the settings of Gemma 4."""
        # The reference does this scaling in the model.
        return cls._read(settings, tokenizer, HALF_SCALE.mean, HALF_SCALE.std)

    @classmethod
    def read_unified(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Gemma4Processor:
        """Reads the settings of the 12B, whose pixels are in [0, 1]."""
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
        return self.max_tokens

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height after resizing."""
        side = self.patch_size * self.merge_size
        factor = math.sqrt(self.max_tokens * side**2 / (height * width))
        columns, rows = math.floor(factor * width / side), math.floor(factor * height / side)
        if rows == 0:
            columns, rows = min(width // height, self.max_tokens), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.max_tokens)
        return columns * side, rows * side

    def views(self, image: Image) -> np.ndarray:
        return np.asarray(self.resized(image, *self.target_size(*image.size)))[None]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.target_size(width, height)
        count = columns * rows // (self.patch_size * self.merge_size) ** 2
        return [self.placeholder_id] * count, list(range(count))

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        """Adds the tokens around an image, which do not see each other."""
        del text
        image = (self.start_id, self.placeholder_id, self.end_id)
        spelled = [each for i in token_ids for each in (image if i == self.placeholder_id else (i,))]
        return spelled, [i for i, token_id in enumerate(spelled) if token_id == self.placeholder_id]
