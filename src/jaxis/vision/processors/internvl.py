"""InternVL's images: cut into squares in a grid of nearly their aspect ratio, with a view of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_START, _IMAGE, _END = "<img>", "<IMG_CONTEXT>", "</img>"


@dataclass(frozen=True, kw_only=True)
class InternVLProcessor(ImageProcessor):
    """Placeholders of all squares lie between a start and an end token.

    Attributes:
      tile_size: Pixels of a side of a square.
      min_tiles, max_tiles: Bounds of the number of squares; the whole is one more if there are several squares.
      num_tokens: Number of tokens of a square.
      start_id, end_id: Tokens around an image.
    """

    tile_size: int
    min_tiles: int
    max_tiles: int
    num_tokens: int
    start_id: int
    end_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> InternVLProcessor:
        """Reads the settings of InternVL."""
        # The reference's processor always crops, whatever the file says.
        settings.check("crop_to_patches", "min_patches", "max_patches")
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            tile_size=settings.square(384),
            min_tiles=settings.image("min_patches", 1),
            max_tiles=settings.image("max_patches", 12),
            num_tokens=settings.processor.get("image_seq_length", 256),
            start_id=settings.token_id(_START, tokenizer),
            end_id=settings.token_id(_END, tokenizer),
        )

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares: of those of nearest aspect ratio, the largest to be half filled."""
        if self.max_tiles <= 1:
            return 1, 1
        sides = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in sides for r in sides if self.min_tiles <= c * r <= self.max_tiles]
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size * self.tile_size * columns * rows
            if distance < nearest or (distance == nearest and fills):
                best, nearest = (columns, rows), distance
        return best

    def views(self, image: Image) -> np.ndarray:
        """Returns the squares row by row, then the whole."""
        tile = self.tile_size
        columns, rows = self.tile_grid(*image.size)
        tiles = tiles_of(self.resized(image, columns * tile, rows * tile), tile)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, np.asarray(self.resized(image, tile, tile))[None]])

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.tile_grid(width, height)
        num_tiles = columns * rows
        count = (num_tiles + (num_tiles > 1)) * self.num_tokens
        return [self.start_id, *[self.placeholder_id] * count, self.end_id], list(range(1, count + 1))
