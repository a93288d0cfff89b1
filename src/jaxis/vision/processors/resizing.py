"""Sizes to which images are resized, grids into which they are cut, and the cutting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]


def tiles_of(image: Image | np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """Cuts an image, or its pixels, into rectangles row by row: uint8 [tiles, height, width, 3].

    Args:
      image: Image or pixels [height, width, 3].
      height: Height of a rectangle, a divisor of the image's.
      width: Width of a rectangle, a divisor of the image's; None for squares.
    """
    pixels, width = np.asarray(image), width or height
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    return pixels.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(rows * columns, height, width, 3)


def nearest_grid(size: Size, tile: int, least: int, most: int) -> Size:
    """Returns columns and rows of squares of nearest aspect ratio to an image's; of several, the largest half filled.

    Args:
      size: Width and height of the image.
      tile: Pixels of a side of a square.
      least: Smallest number of squares.
      most: Largest number of squares.
    """
    (width, height), sides = size, range(1, most + 1)
    grids = [(c, r) for c in sides for r in sides if least <= c * r <= most]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        fills = width * height > 0.5 * tile * tile * columns * rows
        if distance < nearest or (distance == nearest and fills):
            best, nearest = (columns, rows), distance
    return best


def least_enlarged_grid(size: Size, tile: int, most: int) -> Size:
    """Returns columns and rows of at most `most` squares: the grid that enlarges it least, or shrinks it least.

    Args:
      size: Width and height of the image.
      tile: Pixels of a side of a square.
      most: Largest number of squares.
    """
    (width, height), sides = size, range(1, most + 1)
    grids = sorted(((c, r) for c in sides for r in sides if c * r <= most), key=math.prod)
    scales = [min(tile * c / width, tile * r / height) for c, r in grids]
    enlarging = [scale for scale in scales if scale >= 1]
    return grids[scales.index(min(enlarging) if enlarging else max(scales))]


def filled_grid(size: Size, tile: int, most: int, *, is_enlarged: bool) -> Size:
    """Returns a grid as `least_enlarged_grid`; with `is_enlarged`, the one that enlarges the image most."""
    width, height = size
    by_ratio: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in (each for each in range(1, count + 1) if count % each == 0):
            by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    grids = np.asarray([grid for grids in by_ratio.values() for grid in grids])
    # The reference rounds to float32, which decides between grids.
    sides = (grids * tile).astype(np.float32)
    scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
    larger = scales[scales >= 1]
    chosen = grids[scales == (scales.max() if larger.size == 0 or is_enlarged else larger.min())]
    rows, columns = chosen[np.argmin(chosen.prod(axis=1))]
    return int(columns), int(rows)


def fitted(size: Size, canvas: Size, tile: int | None = None, rounded: Callable[[float], int] = math.floor) -> Size:
    """Returns width and height in proportion that fill a canvas in one direction.

    Args:
      size: Width and height of the image.
      canvas: Width and height of the canvas.
      tile: Pixels to which a side of a smaller image may grow, at most; None for any growth.
      rounded: Rounding of the other side, `math.floor` or `math.ceil`.
    """
    (width, height), (most_width, most_height) = size, canvas
    if tile is not None:
        most_width, most_height = min(max(width, tile), most_width), min(max(height, tile), most_height)
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return most_width, max(min(rounded(height * by_width), most_height), 1)
    return max(min(rounded(width * by_height), most_width), 1), most_height


def rectangles(size: Size, most: int, area: int) -> Size:
    """Returns columns and rows of about as many rectangles of an area as an image has, nearest to its aspect ratio."""
    width, height = size
    fitting = min(math.ceil(width * height / area), most)
    if fitting <= 1:
        return 1, 1
    counts = [count for count in (fitting - 1, fitting, fitting + 1) if 1 < count <= most]
    grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    ratio = math.log(width / height)
    rows, columns = min(grids, key=lambda grid: (abs(ratio - math.log(grid[1] / grid[0])), -grid[0]))
    return columns, rows


def edge_then_multiples(size: Size, longest: int, most: int, tile: int) -> tuple[Size, Size]:
    """Returns sizes whose longer side is `longest`, at most `most`, and then as multiples of `tile`."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        width, height = _even(int(longest * ratio)), longest
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > most:
        width, height = most, max(int(most / ratio), 1)
    elif height > width and height > most:
        width, height = max(int(most * ratio), 1), most
    first, ratio = (width, height), width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return first, (width, math.ceil(int(width / ratio) / tile) * tile)
    height = math.ceil(height / tile) * tile
    return first, (math.ceil(int(height * ratio) / tile) * tile, height)


def _even(side: int) -> int:
    return side + side % 2


def multiple(length: float, of: int) -> int:
    """Returns the nearest multiple, at least one."""
    return max(round(length / of) * of, of)


def centered(image: Image | np.ndarray, size: Size, color: Sequence[int] = (0, 0, 0)) -> np.ndarray:
    """Returns pixels [height, width, 3] of another size with the middle of an image in the middle, without resizing.

    Args:
      image: Image or pixels.
      size: Width and height.
      color: Red, green and blue around the image.
    """
    pixels, canvas = np.asarray(image), np.full((*size[::-1], 3), color, np.uint8)
    (top, left), (above, beside) = (
        [max((larger - smaller) // 2, 0) for larger, smaller in zip(a.shape[:2], b.shape[:2], strict=True)]
        for a, b in ((canvas, pixels), (pixels, canvas))
    )
    shown = pixels[above : above + canvas.shape[0], beside : beside + canvas.shape[1]]
    canvas[top : top + shown.shape[0], left : left + shown.shape[1]] = shown
    return canvas


def whole_patches(views: np.ndarray, patch_size: int) -> np.ndarray:
    """Returns views without pixels at the right and lower edges that fill no whole patch."""
    height, width = (each // patch_size * patch_size for each in views.shape[1:3])
    return views[:, :height, :width]


def size_within(
    size: tuple[int, int],
    side: int,
    least: int,
    most: int,
    *,
    frames: int = 1,
    compared_frames: int | None = None,
    fewest: int = 0,
) -> tuple[int, int]:
    """Returns the width and height nearest to an image's that are multiples of `side`, within bounds of pixels.

    Args:
      size: Width and height of the image.
      side: Pixels of which width and height become multiples.
      least: Smallest number of pixels, approximately.
      most: Largest number of pixels.
      frames: Number of times that the pixels count.
      compared_frames: Number of times that they count in the comparison with the bounds; None means `frames`.
      fewest: Smallest multiple of `side` for width and height before the bounds apply.
    """
    width, height = size
    columns, rows = (max(round(each / side), fewest) for each in size)
    pixels = (frames if compared_frames is None else compared_frames) * columns * rows * side * side
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        columns, rows = (max(math.floor(each / shrink / side), 1) for each in size)
    elif pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        columns, rows = (math.ceil(each * grow / side) for each in size)
    return columns * side, rows * side


def enlarged_to(size: Size, side: int) -> Size:
    """Returns width and height of an image in proportion whose shorter side has at least `side` pixels."""
    width, height = size
    grow = max(side / height, side / width)
    return (int(width * grow), int(height * grow)) if min(size) < side else size


def enlarged_in_turn(size: Size, side: int) -> Size:
    """Returns width and height after the height, and then the width, were enlarged in proportion to `side` pixels."""
    width, height = size
    if height < side:
        width, height = round(width * side / height), side
    if width < side:
        width, height = side, round(height * side / width)
    return width, height


def most_merged(size: Size, side: int, most: int) -> Size:
    """Returns the largest width and height that are multiples of `side` with at most this many squares of it."""
    width, height = size
    factor = math.sqrt(most * side**2 / (height * width))
    columns, rows = math.floor(factor * width / side), math.floor(factor * height / side)
    if rows == 0:
        columns, rows = min(width // height, most), 1
    elif columns == 0:
        columns, rows = 1, min(height // width, most)
    return columns * side, rows * side


def nearest_merged(size: Size, side: int, most: int) -> Size:
    """Returns width and height of the adjacent grid of squares with the nearest aspect ratio.

    Args:
      size: Width and height of the image.
      side: Pixels of a side of a square.
      most: Largest number of squares.
    """
    width, height = size
    rows, columns = height / side, width / side
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    whole = itertools.product(*((math.floor(each), math.ceil(each)) for each in (rows, columns)))
    # The set decides between equal grids as in the reference, which takes its first element.
    fitting = [grid for grid in set(whole) if 1 <= grid[0] * grid[1] <= most]
    if not fitting:
        fitting = [(max(1, round(rows)), max(1, round(columns)))]
    rows, columns = min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
    return columns * side, rows * side


def shrunk_to_patches(size: Size, patch: int, most: int, most_of_side: int) -> Size:
    """Returns width and height in proportion, with at most about `most` patches, and `most_of_side` in a row."""
    width, height = size
    num_patches = max(height // patch, 1) * max(width // patch, 1)
    limit = most_of_side * patch
    scale = min(1.0, math.sqrt(most / num_patches), limit / height, limit / width)
    columns, rows = (min(max(int(each * scale), 1), limit) for each in size)
    return columns, rows


def padded_to_squares(size: Size, side: int, least: int, most: int) -> tuple[Size, Size]:
    """Returns width and height in proportion, and those of the `least` to `most` squares of `side` around them.

    As `smart_resize` and `resize` of GLM-5.3-Flash.
    """
    width, height = size
    (columns, rows), area = _squares(size, side), least * side * side
    if columns * rows < least:
        scale = math.sqrt(area / (height * width))
        columns, rows = _squares([math.ceil(each * scale) for each in size], side)
    if columns * rows > most:
        columns, rows, low, high = 1, 1, 1, height
        while low <= high:
            middle = (low + high) // 2
            tried = _squares((max(1, math.floor(width * middle / height)), middle), side)
            if math.prod(tried) <= most:
                (columns, rows), low = tried, middle + 1
            else:
                high = middle - 1
    canvas = columns * side, rows * side
    scale = min(canvas[1] / height, canvas[0] / width, 1.0 if height * width >= area else math.inf)
    width, height = (max(1, min(whole, math.floor(each * scale))) for each, whole in zip(size, canvas, strict=True))
    return (width, height), canvas


def _squares(size: Sequence[int], side: int) -> Size:
    return -(-size[0] // side), -(-size[1] // side)


def shrunk_to_edge(size: Size, side: int, longest: int) -> Size:
    """Returns width and height as multiples of `side`, in proportion, with at most about `longest` pixels."""
    width, height = size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        # A short side of a very long image must not round to 0.
        width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
    return -(-width // side) * side, -(-height // side) * side
