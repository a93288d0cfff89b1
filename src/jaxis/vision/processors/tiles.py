"""Images that are cut into squares, with a view of the whole: of InternVL, Aya Vision, Command A Vision and Llama 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, placed
from jaxis.vision.processors.resizing import nearest_grid, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_START, _PATCH, _LINE, _END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"


@dataclass(frozen=True, kw_only=True)
class TileProcessor(ImageProcessor):
    """Images of InternVL; placeholders of all squares lie between a start and an end token.

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
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> TileProcessor:
        """Reads the settings of InternVL."""
        shared = settings.shared(tokenizer, "<IMG_CONTEXT>", CLIP_SCALE)
        # The reference's processor always crops, whatever the file says.
        tiles = cls.tiles(settings, tokenizer, 384, ("<img>", "</img>"))
        return cls(**shared, **tiles, num_tokens=settings.processor.get("image_seq_length", 256))

    @staticmethod
    def tiles(settings: ProcessorSettings, tokenizer: Tokenizer, size: int, around: tuple[str, str]) -> dict[str, Any]:
        """Returns the fields about squares, with the default of their size, and the tokens around an image."""
        settings.check("crop_to_patches", "min_patches", "max_patches")
        start_id, end_id = (settings.token_id(token, tokenizer) for token in around)
        return {
            **{"tile_size": settings.square(size), "start_id": start_id, "end_id": end_id},
            **{"min_tiles": settings.image("min_patches", 1), "max_tiles": settings.image("max_patches", 12)},
        }

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares: of those of nearest aspect ratio, the largest to be half filled."""
        if self.max_tiles <= 1:
            return 1, 1
        return nearest_grid((width, height), self.tile_size, self.min_tiles, self.max_tiles)

    def canvas(self, image: Image) -> Image | np.ndarray:
        """Returns the image in the size of its grid."""
        columns, rows = self.tile_grid(*image.size)
        return self.resized(image, columns * self.tile_size, rows * self.tile_size)

    def views(self, image: Image) -> np.ndarray:
        """Returns the squares row by row, then the whole."""
        tiles = tiles_of(self.canvas(image), self.tile_size)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, np.asarray(self.resized(image, self.tile_size, self.tile_size))[None]])

    def num_views(self, width: int, height: int) -> int:
        count = math.prod(self.tile_grid(width, height))
        return count + (count > 1)

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        tiles = [self.placeholder_id] * (self.num_views(width, height) * self.num_tokens)
        return placed([self.start_id, *tiles, self.end_id], self.placeholder_id)


@dataclass(frozen=True, kw_only=True)
class AyaVisionProcessor(TileProcessor):
    """Images of Aya Vision, in the grid of nearest aspect ratio; text before each square names it.

    Attributes:
      written: Text that stands for an image in a prompt.
      names: Tokens before each square, from the first on, and last those before the whole.
      encode: Tokenizes text, with or without the tokenizer's special tokens.
    """

    written: str
    names: tuple[list[int], ...]
    encode: Callable[[str, bool], list[int]]

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> AyaVisionProcessor:
        """Reads the settings of Aya Vision."""
        of_processor = settings.processor.get

        def encode(text: str, add_special: bool) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special)

        written = of_processor("img_patch_token", _PATCH)
        shared = settings.shared(tokenizer, of_processor("image_token", "<image>"), CLIP_SCALE, token=written)
        around = of_processor("start_of_img_token", _START), of_processor("end_of_img_token", _END)
        tiles = cls.tiles(settings, tokenizer, 384, around)
        name, name_of_whole = of_processor("tile_token", "TILE"), of_processor("tile_global_token", "TILE_GLOBAL")
        names = [*(f"{name}_{i + 1}" for i in range(tiles["max_tiles"])), name_of_whole]
        side = of_processor("patch_size", 28) * of_processor("downsample_factor", 1)
        num_tokens = (of_processor("img_size", 364) // side) ** 2
        of_names = tuple(encode(each, False) for each in names)
        return cls(**shared, **tiles, num_tokens=num_tokens, written=written, names=of_names, encode=encode)

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        num_tiles = math.prod(self.tile_grid(width, height))
        tokens, places = [self.start_id], []
        for name in [*(self.names[:num_tiles] if num_tiles > 1 else ()), self.names[-1]]:
            tokens += name
            places += range(len(tokens), len(tokens) + self.num_tokens)
            tokens += [self.placeholder_id] * self.num_tokens
        return [*tokens, self.end_id], places

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        """Also replaces the text that templates write for an image, which is no single token."""
        spelled = list(token_ids)
        if text is not None:
            adds_special = self.encode(text, False) != spelled
            spelled = self.encode(text.replace(self.placeholder, self.written), adds_special)
        return placed(spelled, self.placeholder_id)


@dataclass(frozen=True, kw_only=True)
class Cohere2VisionProcessor(TileProcessor):
    """Images of Command A Vision, in the grid that enlarges (or else shrinks) them least; a token ends each square.

    Attributes:
      line_id: Token after a square.
    """

    line_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Cohere2VisionProcessor:
        """Reads the settings of Command A Vision."""
        tiles = cls.tiles(settings, tokenizer, 512, (_START, _END))
        if not settings.image("crop_to_patches", True):
            tiles["max_tiles"] = 1
        shared = settings.shared(tokenizer, _PATCH, CLIP_SCALE)
        num_tokens, line_id = settings.image("patch_size", 16) ** 2, settings.token_id(_LINE, tokenizer)
        return cls(**shared, **tiles, num_tokens=num_tokens, line_id=line_id)

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares: the grid that enlarges the image least, or else shrinks it least."""
        sides = range(1, self.max_tiles + 1)
        grids = sorted(((c, r) for c in sides for r in sides if c * r <= self.max_tiles), key=math.prod)
        scales = [min(self.tile_size * c / width, self.tile_size * r / height) for c, r in grids]
        enlarging = [scale for scale in scales if scale >= 1]
        return grids[scales.index(min(enlarging) if enlarging else max(scales))]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        tile = [*[self.placeholder_id] * self.num_tokens, self.line_id]
        return placed([self.start_id, *tile * self.num_views(width, height), self.end_id], self.placeholder_id)


@dataclass(frozen=True, kw_only=True)
class Llama4Processor(TileProcessor):
    """Images of Llama 4: a token separates squares of a row, another ends the row; the whole comes last.

    Attributes:
      is_enlarged: True if images fill their grid even if they are smaller.
      patch_id, column_id, row_id: Tokens of an image.
    """

    is_enlarged: bool
    patch_id: int
    column_id: int
    row_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Llama4Processor:
        """Reads the settings of Llama 4."""
        settings.check("max_patches", "resize_to_max_canvas")
        tile = settings.square(336)
        patch, ratio = settings.processor.get("patch_size", 14), settings.processor.get("pixel_shuffle_ratio", 0.5)
        names = {"start": "image_start", "patch": "patch", "column": "tile_x_separator", "row": "tile_y_separator"}
        names |= {"end": "image_end"}
        tokens: dict[str, Any] = {
            f"{name}_id": settings.token_id(f"<|{token}|>", tokenizer) for name, token in names.items()
        }
        return cls(
            **settings.shared(tokenizer, "<|image|>", HALF_SCALE, 2),
            **tokens,
            tile_size=tile,
            min_tiles=1,
            max_tiles=settings.image("max_patches", 16),
            is_enlarged=settings.image("resize_to_max_canvas", False),
            num_tokens=(tile // patch) ** 2 // round(1 / ratio**2),
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

    def canvas(self, image: Image) -> np.ndarray:
        """Returns the image in proportion, and zeros below or to the right of it."""
        (width, height), tile = image.size, self.tile_size
        most_width, most_height = (number * tile for number in self.tile_grid(width, height))
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
        return canvas

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.tile_grid(width, height)
        tile = [self.patch_id] * self.num_tokens
        line = [*tile, *([self.column_id, *tile] * (columns - 1)), self.row_id]
        lines = line * rows if columns * rows > 1 else []
        return placed([self.start_id, *lines, self.placeholder_id, *tile, self.end_id], self.patch_id)
