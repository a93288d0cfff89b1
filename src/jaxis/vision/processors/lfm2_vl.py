"""LFM2-VL's images: in their own aspect ratio; large ones are cut into squares, with a view of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, ViewGroup, size_within, tiles_of

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
class Lfm2VLProcessor(ImageProcessor):
    """A token precedes each square, and another the whole.

    Attributes:
      side: Pixels of a side of a merged patch.
      min_tokens, max_tokens: Bounds of the tokens of an image that is not cut, and of the whole of one that is.
      tile_size: Pixels of a side of a square.
      min_tiles, max_tiles: Bounds of the number of squares; with a maximum of 1, no image is cut.
      tolerance: Factor of `max_tokens` up to which an image is not cut.
      has_whole: True if the whole follows the squares.
      has_marks: True if there are other tokens than placeholders.
      encode: Tokenizes the text that stands for an image.
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
    encode: Callable[[str], list[int]]

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Lfm2VLProcessor:
        """Reads the settings of LFM2-VL."""
        settings.check(*_SETTINGS)
        cuts = settings.image("do_image_splitting", True)
        return cls(
            pixel_scale=settings.scale(HALF_SCALE),
            resample=settings.image("resample", 2),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
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
        sides = range(1, self.max_tiles + 1)
        grids = {(c, r) for c in sides for r in sides if self.min_tiles <= c * r <= self.max_tiles}
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid)):
            distance = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size * self.tile_size * columns * rows
            if distance < nearest or (distance == nearest and fills):
                best, nearest = (columns, rows), distance
        return best

    def parts(self, image: Image) -> list[ViewGroup]:
        """Returns the squares row by row, then the whole."""
        columns, rows = self.tile_grid(*image.size)
        texts, views = self._texts(*image.size), []
        if (columns, rows) != (1, 1):
            views.append(tiles_of(self.resized(image, columns * self.tile_size, rows * self.tile_size), self.tile_size))
        if len(views) < len(texts):
            views.append(np.asarray(self.resized(image, *self.target_size(*image.size)))[None])
        return [ViewGroup(each, *self._tokens(text)) for each, text in zip(views, texts, strict=True)]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        return self._tokens("".join(self._texts(width, height)))

    def _tokens(self, text: str) -> tuple[list[int], list[int]]:
        token_ids = self.encode(text)
        return token_ids, [i for i, token_id in enumerate(token_ids) if token_id == self.placeholder_id]

    def _texts(self, width: int, height: int) -> list[str]:
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
