"""Images that are cut into rectangles, with a view of the whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxis.vision.processors.processor import Encode, ImageProcessor, ViewGroup, placed, rewritten
from jaxis.vision.processors.resizing import Size, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Cut(NamedTuple):
    """Views of an image: rectangles of a grid, and the whole.

    Attributes:
      columns, rows: Numbers of the grid; 1 and 1 for an image that is seen whole only.
      tile: Width and height of a rectangle.
      whole: Width and height of the whole; None for rectangles alone.
    """

    columns: int
    rows: int
    tile: Size
    whole: Size | None


@dataclass(frozen=True)
class Marks:
    """Text of an image in the prompt, around the placeholders of its views.

    Attributes:
      start, end: Text before and after the image.
      tile: Text before and after a rectangle. `{row}`, `{column}` and `{number}` in it count from 1.
      whole: Text before and after the whole.
      column: Text between the rectangles of a row.
      row: Text between rows.
      after: Text after all rectangles.
    """

    start: str = ""
    end: str = ""
    tile: tuple[str, str] = ("", "")
    whole: tuple[str, str] = ("", "")
    column: str = ""
    row: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class TileProcessor(ImageProcessor):
    """An image becomes the views of its `Cut`: rectangles row by row, then the whole.

    Attributes:
      cut: Function from an image's size to its views.
      marks: Text around the placeholders.
      num_tokens: Function from a view's size to the number of its tokens.
      patch, patch_id: Text and id of the token that takes an embedding.
      encode: Tokenizes text.
      steps: Function from an image's size to those that it takes one after the other before it is cut.
      fit: Function from an image's size and its canvas' to its size on the canvas, which is black to the right and
        below; None: the image fills the canvas.
      is_apart: True if rectangles and the whole are groups of their own, False if all have one size.
      is_whole_first: True if the whole comes before the rectangles.
    """

    cut: Callable[[Size], Cut]
    marks: Marks
    num_tokens: Callable[[Size], int]
    patch: str
    patch_id: int
    encode: Encode
    steps: Callable[[Size], Sequence[Size]] = lambda _: ()
    fit: Callable[[Size, Size], Size] | None = None
    is_apart: bool = False
    is_whole_first: bool = False

    def parts(self, image: Image) -> list[ViewGroup]:
        of_groups = zip(self._views(image), self._tokens(image.size), strict=True)
        return [ViewGroup(views, *placed(tokens, self.patch_id)) for views, tokens in of_groups]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        return placed([*itertools.chain(*self._tokens((width, height)))], self.patch_id)

    def _views(self, image: Image) -> list[np.ndarray]:
        """Returns the views of each group."""
        columns, rows, (width, height), whole = self.cut(image.size)
        image = functools.reduce(lambda smaller, size: self.resized(smaller, *size), self.steps(image.size), image)
        if (columns, rows) == (1, 1):
            return [self._canvas(image, whole or (width, height))[None]]
        groups = [tiles_of(self._canvas(image, (columns * width, rows * height)), height, width)]
        if whole is not None:
            groups.append(np.asarray(self.resized(image, *whole))[None])
        groups = groups[::-1] if self.is_whole_first else groups
        return groups if self.is_apart else [np.concatenate(groups)]

    def _canvas(self, image: Image, size: Size) -> np.ndarray:
        if self.fit is None:
            return np.asarray(self.resized(image, *size))
        width, height = self.fit(image.size, size)
        pixels = np.asarray(self.resized(image, width, height))
        return np.pad(pixels, ((0, size[1] - height), (0, size[0] - width), (0, 0)))

    def _tokens(self, size: Size) -> list[list[int]]:
        """Returns the tokens of each group of views."""
        (columns, rows, tile, whole), marks = self.cut(size), self.marks
        groups = [] if whole is None else [(self.patch.join(marks.whole), whole)]
        if (columns, rows) != (1, 1):
            each = self.patch.join(marks.tile).format
            lines = [
                [each(row=r + 1, column=c + 1, number=r * columns + c + 1) for c in range(columns)] for r in range(rows)
            ]
            tiles = marks.row.join(map(marks.column.join, lines)) + marks.after, tile
            groups = [*groups, tiles] if self.is_whole_first else [tiles, *groups]
        if not self.is_apart:
            groups = [("".join(text for text, _ in groups), tile)]
        texts = [text for text, _ in groups]
        texts[0] = marks.start + texts[0]
        texts[-1] += marks.end
        return [self._repeated(text, self.num_tokens(size)) for text, (_, size) in zip(texts, groups, strict=True)]

    def _repeated(self, text: str, count: int) -> list[int]:
        """Returns the tokens of a string, each placeholder as often as a view has tokens."""
        return [i for token in self.encode(text, False) for i in [token] * (count if token == self.patch_id else 1)]


class AyaVisionProcessor(TileProcessor):
    """Images of Aya Vision, for which templates write several tokens for one image."""

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        spelled = rewritten(self.encode, token_ids, text, self.placeholder, self.patch)
        return placed(spelled, self.placeholder_id)


class NumberedTileProcessor(TileProcessor):
    """Images of MiniCPM-V 4.6, whose numbers are in the prompt before them."""

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        del text
        spelled: list[int] = []
        places: list[int] = []
        for token_id in token_ids:
            if token_id == self.placeholder_id:
                spelled += self.encode(f"<image_id>{len(places)}</image_id>", False)
                places.append(len(spelled))
            spelled.append(token_id)
        return spelled, places
