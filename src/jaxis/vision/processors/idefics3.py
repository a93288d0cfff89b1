"""Idefics3's and SmolVLM's images: enlarged, cut into squares, with a view of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import SpelledProcessor
from jaxis.vision.processors.resizing import tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_MOST_PIXELS = 4096  # of a side


@dataclass(frozen=True, kw_only=True)
class Idefics3Processor(SpelledProcessor):
    """The prompt names row and column of each square before its placeholders.

    Attributes:
      longest_edge: Pixels of the longer side, before both become multiples of a square's side.
      tile_size: Pixels of a side of a square.
      splits: True for squares and the whole, False for the whole alone.
      num_tokens: Number of tokens of a square, and of the whole.
    """

    longest_edge: int
    tile_size: int
    splits: bool
    num_tokens: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Idefics3Processor:
        """Reads the settings of Idefics3 and SmolVLM."""
        settings.check("max_image_size", "do_image_splitting", "return_row_col_info", "video_sampling")
        return cls(
            **settings.shared(tokenizer, _IMAGE, HALF_SCALE, 1),
            longest_edge=settings.size("size", "longest_edge", 4 * 364),
            tile_size=settings.size("max_image_size", "longest_edge", 364),
            splits=settings.image("do_image_splitting", True),
            num_tokens=settings.processor.get("image_seq_len", 169),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )

    def target_sizes(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns width and height after the first and the second resizing; then the image is cut."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, _even(int(self.longest_edge / ratio))
        else:
            width, height = _even(int(self.longest_edge * ratio)), self.longest_edge
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _MOST_PIXELS:
            width, height = _MOST_PIXELS, max(int(_MOST_PIXELS / ratio), 1)
        elif height > width and height > _MOST_PIXELS:
            width, height = max(int(_MOST_PIXELS * ratio), 1), _MOST_PIXELS
        first = width, height
        ratio, tile = width / height, self.tile_size
        if width >= height:
            width = math.ceil(width / tile) * tile
            return first, (width, math.ceil(int(width / ratio) / tile) * tile)
        height = math.ceil(height / tile) * tile
        return first, (math.ceil(int(height * ratio) / tile) * tile, height)

    def groups(self, image: Image) -> list[np.ndarray]:
        """Returns the squares row by row, then the whole, as one group."""
        tile = self.tile_size
        first, second = self.target_sizes(*image.size)
        image = self.resized(image, *first)
        if not self.splits:
            return [np.asarray(self.resized(image, tile, tile))[None]]
        image = self.resized(image, *second)
        if second == (tile, tile):
            return [np.asarray(image)[None]]
        return [np.concatenate([tiles_of(image, tile), np.asarray(self.resized(image, tile, tile))[None]])]

    def texts(self, width: int, height: int) -> list[str]:
        _, second = self.target_sizes(width, height)
        columns, rows = (side // self.tile_size for side in second)
        images = _IMAGE * self.num_tokens
        text = f"{_AROUND}{_WHOLE}{images}{_AROUND}"
        if self.splits and (columns, rows) != (1, 1):
            lines = (
                "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{images}" for column in range(columns)) + "\n"
                for row in range(rows)
            )
            text = f"{''.join(lines)}\n{text}"
        return [text]


def _even(side: int) -> int:
    return side + side % 2
