"""LFM2-VL's images: in their own aspect ratio; large ones are cut into squares, with a view of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import SpelledProcessor
from jaxis.vision.processors.resizing import nearest_grid, size_within, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE, _START, _END, _WHOLE = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
_SETTINGS = (
    *("downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
    *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "return_row_col_info"),
    "max_num_patches",
)


@dataclass(frozen=True, kw_only=True)
class Lfm2VLProcessor(SpelledProcessor):
    """A token precedes each square, and another the whole.

    Attributes:
      side: Pixels of a side of a merged patch.
      min_tokens, max_tokens: Bounds of the tokens of an image that is not cut, and of the whole of one that is.
      tile_size: Pixels of a side of a square.
      min_tiles, max_tiles: Bounds of the number of squares; with a maximum of 1, no image is cut.
      tolerance: Factor of `max_tokens` up to which an image is not cut.
      has_whole: True if the whole follows the squares.
      has_marks: True if there are other tokens than placeholders.
    """

    side: int
    min_tokens: int
    max_tokens: int
    tile_size: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    has_whole: bool
    has_marks: bool

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Lfm2VLProcessor:
        """Reads the settings of LFM2-VL."""
        settings.check(*_SETTINGS)
        cuts = settings.image("do_image_splitting", True)
        return cls(
            **settings.shared(tokenizer, _IMAGE, HALF_SCALE, 2),
            side=settings.image("encoder_patch_size", 16) * settings.image("downsample_factor", 2),
            min_tokens=settings.image("min_image_tokens", 64),
            max_tokens=settings.image("max_image_tokens", 256),
            tile_size=settings.image("tile_size", 512),
            min_tiles=settings.image("min_tiles", 2) if cuts else 1,
            max_tiles=settings.image("max_tiles", 10) if cuts else 1,
            tolerance=settings.image("max_pixels_tolerance", 2.0),
            has_whole=settings.image("use_thumbnail", True),
            has_marks=settings.processor.get("use_image_special_tokens", True),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of a whole image after resizing."""
        least, most = (num_tokens * self.side**2 for num_tokens in (self.min_tokens, self.max_tokens))
        return size_within((width, height), self.side, least, most, fewest=1)

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares; (1, 1) for an image that is not cut."""
        # As in the reference, a side that rounds to 0 merged patches counts as half a patch.
        columns, rows = (max(round(each / self.side), 0.5) for each in (width, height))
        if columns * rows <= self.max_tokens * self.tolerance or self.max_tiles == 1:
            return 1, 1
        return nearest_grid((width, height), self.tile_size, self.min_tiles, self.max_tiles)

    def groups(self, image: Image) -> list[np.ndarray]:
        """Returns the squares row by row, then the whole."""
        columns, rows = self.tile_grid(*image.size)
        groups: list[np.ndarray] = []
        if (columns, rows) != (1, 1):
            canvas = self.resized(image, columns * self.tile_size, rows * self.tile_size)
            groups.append(tiles_of(canvas, self.tile_size))
        if self.has_whole or not groups:
            groups.append(np.asarray(self.resized(image, *self.target_size(*image.size)))[None])
        return groups

    def texts(self, width: int, height: int) -> list[str]:
        """Returns the text that stands for the squares, if any, and for the whole, if any."""
        columns, rows = self.tile_grid(width, height)
        whole = _IMAGE * (math.prod(self.target_size(width, height)) // self.side**2)
        start, end = (_START, _END) if self.has_marks else ("", "")
        if (columns, rows) == (1, 1):
            return [start + whole + end]
        tile = _IMAGE * math.ceil(self.tile_size / self.side) ** 2
        places = ((row + 1, column + 1) for row in range(rows) for column in range(columns))
        marks = (f"<|img_row_{row}_col_{column}|>" if self.has_marks else "" for row, column in places)
        tiles = start + "".join(mark + tile for mark in marks)
        if not self.has_whole:
            return [tiles + end]
        return [tiles, (_WHOLE if self.has_marks else "") + whole + end]
