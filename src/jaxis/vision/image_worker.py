"""What becomes of an image's file: Pillow decodes it, in a process with limits that `decode` asks.

The file imports nothing of jaxis (see `host/limited_worker.py`). What it says of an image follows the image's name, and
is in words of our own, whatever went wrong inside a decoder: "has 9000 x 9000 pixels, more than ...".
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from PIL import GifImagePlugin, Image, ImageChops, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

# What `Image.open` looks for is what was imported: without these, it imports the plugins of all formats there are.
_PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)

_PART_PIXELS = 1 << 15
# Pillow's conversions of more than 8 bits clip. As in libpng's `png_set_strip_16`, the high byte stays.
_HIGH_BYTES = [value >> 8 for value in range(1 << 16)]
# Of PNG, whose transparent color counts in the file's bits; by what Pillow calls its pixels.
_GRAY_BITS = {"L;2": 2, "L;4": 4, "L": 8}


class RefusedImageError(Exception):
    """An image that is not taken, and why."""


def check_size(size: tuple[int, int], max_pixels: int, max_ratio: int) -> None:
    """Checks an image's size.

    Args:
      size: Width and height.
      max_pixels: Most pixels.
      max_ratio: Most times that a side may be as long as the other.

    Raises:
      RefusedImageError: It is too large.
    """
    width, height = size
    if width * height > max_pixels:
        raise RefusedImageError(f"has {width} x {height} pixels, more than {max_pixels}: make it smaller")
    if min(width, height) < 1 or max(width, height) > max_ratio * min(width, height):
        raise RefusedImageError(f"has {width} x {height} pixels: one side is more than {max_ratio} times the other")


def open_file(data: bytes | bytearray, formats: list[str], max_pixels: int, max_ratio: int) -> Image.Image:
    """Reads a file's header, and checks the size that it claims; no pixel is decoded.

    Args:
      data: The file.
      formats: Of Pillow, those that are taken.
      max_pixels: See `check_size`.
      max_ratio: See `check_size`.

    Raises:
      RefusedImageError: It is no image of a known format, or too large.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedImageError(f"has more than {max_pixels} pixels: make it smaller") from None
    except MemoryError:
        raise
    except Exception:  # of any kind: decoders raise whatever a broken file makes them stumble over
        names = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise RefusedImageError(f"is not an image that can be read: send {names}") from None
    check_size(image.size, max_pixels, max_ratio)
    return image


def to_rgb(image: Image.Image, max_pixels: int, max_ratio: int, *, in_place: bool = False) -> Image.Image:
    """Decodes the pixels of the first frame: in RGB, upright, and where it is transparent, on white.

    Args:
      image: An image, of which only the header may be read.
      max_pixels: See `check_size`.
      max_ratio: See `check_size`.
      in_place: Whether the image itself may be turned, which spares a copy.

    Raises:
      RefusedImageError: Its file is broken or truncated, or it has a mode that does not become RGB.
    """
    try:
        image = _of_eight_bits(image, max_pixels, max_ratio, in_place=in_place)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except (RefusedImageError, MemoryError):
        raise
    except Exception:  # see `open_file`
        raise RefusedImageError("cannot be decoded: the file is broken or truncated") from None


def _of_eight_bits(image: Image.Image, max_pixels: int, max_ratio: int, *, in_place: bool) -> Image.Image:
    """The image upright, with 8 bits of each value, and its transparent color in the same bits."""
    is_wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if image.mode in ("I", "F") and not is_wide:
        raise RefusedImageError(
            f"is of Pillow's mode {image.mode}, whose values have no range: scale them to 0 to 255, and convert it to L"
        )
    if image.mode == "La":
        raise RefusedImageError("is of Pillow's mode La, which does not become RGB: convert it to LA")
    pixels, clear = _pixels_in_file(image), image.info.get("transparency")
    low_bytes = _low_bytes(image) if pixels == "RGB;16B" and clear is not None else None
    image = ImageOps.exif_transpose(image, in_place=in_place) or image
    # The size that a header gives need not be that of the pixels.
    check_size(image.size, max_pixels, max_ratio)
    if is_wide:
        return _of_sixteen_bits(image, clear)
    if low_bytes is not None and clear is not None:
        highs, lows = [value >> 8 for value in clear], [value & 255 for value in clear]
        is_clear = ImageChops.darker(_has_color(image, highs), _has_color(low_bytes, lows))
        image.putalpha(ImageChops.invert(is_clear))
    elif isinstance(clear, int) and pixels in _GRAY_BITS:
        most = (1 << _GRAY_BITS[pixels]) - 1
        image.info["transparency"] = (clear & most) * (255 // most)
    elif isinstance(clear, tuple) and pixels == "RGB":
        image.info["transparency"] = tuple(value & 255 for value in clear)
    return image


def _pixels_in_file(image: Image.Image) -> str | None:
    """What Pillow calls the pixels of a PNG that it has not decoded yet."""
    tiles = image.tile if isinstance(image, PngImagePlugin.PngImageFile) else []
    return tiles[0].args if tiles and isinstance(tiles[0].args, str) else None


def _of_sixteen_bits(image: Image.Image, clear: int | None) -> Image.Image:
    """Gray of 8 bits, and where it has the transparent value, none."""
    values = image.convert("I")
    gray = values.point(_HIGH_BYTES, "L")
    if clear is None:
        return gray
    return Image.merge("LA", (gray, values.point([255 * (value != clear) for value in range(1 << 16)], "L")))


def _low_bytes(image: Image.Image) -> Image.Image:
    """The low bytes of a PNG of 16-bit colors, of which Pillow keeps the high ones; the image stays undecoded."""
    assert isinstance(image, ImageFile.ImageFile)
    file = image.fp
    assert file is not None
    place = file.tell()
    file.seek(0)
    other = PngImagePlugin.PngImageFile(io.BytesIO(file.read()))
    file.seek(place)
    other.tile = [tile._replace(args="RGB;16L") for tile in other.tile]
    return ImageOps.exif_transpose(other)


def _has_color(image: Image.Image, color: Sequence[int]) -> Image.Image:
    """255 where an image in RGB has a color, and 0 elsewhere."""
    bands = zip(image.split(), color, strict=True)
    return functools.reduce(ImageChops.darker, (band.point([255 * (v == c) for v in range(256)]) for band, c in bands))


def answer(request: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], int, Iterable[bytes]]:
    """Width and height of an image, and if asked for its pixels, uint8 [height, width, 3]; or why it is refused.

    Args:
      request: Formats and limits, and whether pixels are wanted.
      data: The file.
    """
    limits = request["max_pixels"], request["max_ratio"]
    try:
        image = open_file(data, request["formats"], *limits)
        if not request["pixels"]:
            return {"size": image.size}, 0, ()
        image = to_rgb(image, *limits, in_place=True)
    except RefusedImageError as error:
        return {"refused": str(error)}, 0, ()
    return {"size": image.size}, 3 * image.width * image.height, _rows(image)


def _rows(image: Image.Image) -> Iterator[bytes]:
    """Pixels of some rows at a time, which takes less memory and is faster than all at once."""
    width, height = image.size
    number = max(1, _PART_PIXELS // width)
    for y in range(0, height, number):
        yield image.crop((0, y, width, min(y + number, height))).tobytes()
