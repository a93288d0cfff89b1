"""Llama 4's images: resized to a grid of squares, cut into these, with a view of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<|image|>"
_AROUND = ("<|image_start|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>")


@dataclass(frozen=True, kw_only=True)
class Llama4Processor(ImageProcessor):
    """A token separates squares of a row, another ends the row; the whole comes last.

    Attributes:
      tile_size: Pixels of a side of a square.
      max_tiles: Largest number of squares.
      is_enlarged: True if images fill their grid even if they are smaller.
      num_tokens: Number of tokens of a square.
      start_id, patch_id, column_id, row_id, end_id: Tokens of an image.
    """

    tile_size: int
    max_tiles: int
    is_enlarged: bool
    num_tokens: int
    start_id: int
    patch_id: int
    column_id: int
    row_id: int
    end_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Llama4Processor:
        """Reads the settings of Llama 4."""
        settings.check("max_patches", "resize_to_max_canvas")
        tile = settings.square(336)
        patch, ratio = settings.processor.get("patch_size", 14), settings.processor.get("pixel_shuffle_ratio", 0.5)
        start, inside, column, row, end = (settings.token_id(token, tokenizer) for token in _AROUND)
        return cls(
            pixel_scale=settings.scale(HALF_SCALE),
            resample=settings.image("resample", 2),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            tile_size=tile,
            max_tiles=settings.image("max_patches", 16),
            is_enlarged=settings.image("resize_to_max_canvas", False),
            num_tokens=(tile // patch) ** 2 // round(1 / ratio**2),
            start_id=start,
            patch_id=inside,
            column_id=column,
            row_id=row,
            end_id=end,
        )

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares: the grid that enlarges the image least, or else shrinks it least.

        With `is_enlarged`, the grid that enlarges it most.
        """
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.max_tiles, 0, -1):
            for rows in (each for each in range(1, count + 1) if count % each == 0):
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
        grids = np.asarray([grid for grids in by_ratio.values() for grid in grids])
        # The reference rounds to float32, which decides between grids.
        sides = (grids * self.tile_size).astype(np.float32)
        scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
        larger = scales[scales >= 1]
        best = scales.max() if larger.size == 0 or self.is_enlarged else larger.min()
        chosen = grids[scales == best]
        rows, columns = chosen[np.argmin(chosen.prod(axis=1))]
        return int(columns), int(rows)

    def views(self, image: Image) -> np.ndarray:
        """Returns the squares row by row, then the whole."""
        width, height = image.size
        tile, (columns, rows) = self.tile_size, self.tile_grid(width, height)
        most_width, most_height = columns * tile, rows * tile
        canvas = np.zeros((most_height, most_width, 3), np.uint8)
        if not self.is_enlarged:
            most_width, most_height = min(max(width, tile), most_width), min(max(height, tile), most_height)
        by_width, by_height = most_width / width, most_height / height
        if by_width < by_height:
            size = most_width, min(math.floor(height * by_width), most_height)
        else:
            size = min(math.floor(width * by_height), most_width), most_height
        resized = np.asarray(self.resized(image, max(size[0], 1), max(size[1], 1)))
        canvas[: resized.shape[0], : resized.shape[1]] = resized
        tiles = tiles_of(canvas, tile)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, np.asarray(self.resized(image, tile, tile))[None]])

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.tile_grid(width, height)
        tile = [self.patch_id] * self.num_tokens
        token_ids = [self.start_id]
        if columns * rows > 1:
            for _ in range(rows):
                token_ids += [*tile, *([self.column_id, *tile] * (columns - 1)), self.row_id]
        token_ids += [self.placeholder_id, *tile, self.end_id]
        return token_ids, [i for i, token_id in enumerate(token_ids) if token_id == self.patch_id]
