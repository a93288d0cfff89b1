"""Images of Muse Glimmer: patches in the image's aspect ratio, shrunk only if there are too many."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_START, _IMAGE, _END = "<|image_start|>", "<|patch|>", "<|image_end|>"


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerProcessor(ImageProcessor):
    """All placeholders lie between a start and an end token.

    Attributes:
      side: Pixels of a side of a merged patch.
      max_tokens: Largest number of placeholders.
      start_id, end_id: Tokens around an image.
    """

    side: int
    max_tokens: int
    start_id: int
    end_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> MuseGlimmerProcessor:
        """Reads the settings of Muse Glimmer."""
        settings.check("max_image_tokens", "merge_size", "temporal_patch_size")
        return cls(
            pixel_scale=settings.scale(HALF_SCALE),
            resample=settings.image("resample", 1),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            side=settings.image("patch_size", 14) * settings.image("merge_size", 2),
            max_tokens=settings.image("max_image_tokens", 4096),
            start_id=settings.token_id(_START, tokenizer),
            end_id=settings.token_id(_END, tokenizer),
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height after resizing, of the adjacent grid with the nearest aspect ratio."""
        rows, columns = height / self.side, width / self.side
        ratio = columns / rows
        if rows * columns > self.max_tokens:
            rows = (self.max_tokens / ratio) ** 0.5
            columns = rows * ratio
        whole = itertools.product(*((math.floor(each), math.ceil(each)) for each in (rows, columns)))
        # The set decides between equal grids as in the reference, which takes its first element.
        fitting = [grid for grid in set(whole) if 1 <= grid[0] * grid[1] <= self.max_tokens]
        if not fitting:
            fitting = [(max(1, round(rows)), max(1, round(columns)))]
        rows, columns = min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        return columns * self.side, rows * self.side

    def views(self, image: Image) -> np.ndarray:
        return np.asarray(self.resized(image, *self.target_size(*image.size)))[None]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        count = math.prod(each // self.side for each in self.target_size(width, height))
        return [self.start_id, *[self.placeholder_id] * count, self.end_id], list(range(1, count + 1))
