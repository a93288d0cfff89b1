"""Images of Aya Vision and Command A Vision: cut into squares, with a view of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxis.vision.processors.internvl import InternVLProcessor
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

_START, _PATCH, _LINE, _END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"


@dataclass(frozen=True, kw_only=True)
class AyaVisionProcessor(InternVLProcessor):
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
        settings.check("crop_to_patches", "min_patches", "max_patches")

        def of_processor(key: str, default: str) -> str:
            return settings.processor.get(key, default)

        def encode(text: str, add_special: bool) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special)

        side = settings.processor.get("patch_size", 28) * settings.processor.get("downsample_factor", 1)
        max_tiles = settings.image("max_patches", 12)
        name, name_of_whole = of_processor("tile_token", "TILE"), of_processor("tile_global_token", "TILE_GLOBAL")
        names = [f"{name}_{i + 1}" for i in range(max_tiles)]
        written = of_processor("img_patch_token", _PATCH)
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=of_processor("image_token", "<image>"),
            placeholder_id=settings.token_id(written, tokenizer),
            tile_size=settings.square(384),
            min_tiles=settings.image("min_patches", 1),
            max_tiles=max_tiles,
            num_tokens=(settings.processor.get("img_size", 364) // side) ** 2,
            start_id=settings.token_id(of_processor("start_of_img_token", _START), tokenizer),
            end_id=settings.token_id(of_processor("end_of_img_token", _END), tokenizer),
            written=written,
            names=tuple(encode(each, False) for each in (*names, name_of_whole)),
            encode=encode,
        )

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.tile_grid(width, height)
        num_tiles = columns * rows
        names = [*(self.names[:num_tiles] if num_tiles > 1 else ()), self.names[-1]]
        tokens, places = [self.start_id], []
        for name in names:
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
        return spelled, [i for i, token_id in enumerate(spelled) if token_id == self.placeholder_id]


@dataclass(frozen=True, kw_only=True)
class Cohere2VisionProcessor(InternVLProcessor):
    """Images of Command A Vision, in the grid that enlarges (or else shrinks) them least; a token ends each square.

    Attributes:
      line_id: Token after a square.
    """

    line_id: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Cohere2VisionProcessor:
        """Reads the settings of Command A Vision."""
        settings.check("crop_to_patches", "min_patches", "max_patches")
        max_tiles = settings.image("max_patches", 12) if settings.image("crop_to_patches", True) else 1
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=_PATCH,
            placeholder_id=settings.token_id(_PATCH, tokenizer),
            tile_size=settings.square(512),
            min_tiles=settings.image("min_patches", 1),
            max_tiles=max_tiles,
            num_tokens=settings.image("patch_size", 16) ** 2,
            start_id=settings.token_id(_START, tokenizer),
            end_id=settings.token_id(_END, tokenizer),
            line_id=settings.token_id(_LINE, tokenizer),
        )

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of squares: the grid that enlarges the image least, or else shrinks it least."""
        sides = range(1, self.max_tiles + 1)
        grids = sorted(((c, r) for c in sides for r in sides if c * r <= self.max_tiles), key=lambda g: g[0] * g[1])
        scales = [min(self.tile_size * c / width, self.tile_size * r / height) for c, r in grids]
        enlarging = [scale for scale in scales if scale >= 1]
        return grids[scales.index(min(enlarging) if enlarging else max(scales))]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        columns, rows = self.tile_grid(width, height)
        num_tiles = columns * rows
        num_tiles += num_tiles > 1
        tile = [*[self.placeholder_id] * self.num_tokens, self.line_id]
        places = [1 + i * len(tile) + k for i in range(num_tiles) for k in range(self.num_tokens)]
        return [self.start_id, *tile * num_tiles, self.end_id], places
