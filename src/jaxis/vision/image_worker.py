"""Decodes image files by Pillow, in a process with limits that `decode` runs.

The file imports nothing of jaxis (see `host/limited_worker.py`). Its error messages follow the name of the image, and
are in words of our own whatever failed inside a decoder: "has 9000 x 9000 pixels, more than ...".
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from PIL import GifImagePlugin, Image, ImageChops, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

# `Image.open` tries the imported plugins. Without these imports, it would import the plugins of all formats.
_PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)

_PART_PIXELS = 1 << 15
# Pillow's conversions of more than 8 bits clip. Here the high byte is kept, as by libpng's `png_set_strip_16`.
_HIGH_BYTES = [value >> 8 for value in range(1 << 16)]
# Bits of PNG's gray values by Pillow's names of pixels; the transparent color is given in the file's bits.
_GRAY_BITS = {"L;2": 2, "L;4": 4, "L": 8}


class RefusedImageError(Exception):
    """An image that is refused, with the reason."""


def check_size(size: tuple[int, int], max_pixels: int, max_ratio: int) -> None:
    """Checks an image's size.

    Args:
      size: Width and height.
      max_pixels: Largest number of pixels.
      max_ratio: Largest ratio of the longer to the shorter side.

    Raises:
      RefusedImageError: The image is too large or too elongated.
    """
    width, height = size
    if width * height > max_pixels:
        raise RefusedImageError(f"has {width} x {height} pixels, more than {max_pixels}: make it smaller")
    if min(width, height) < 1 or max(width, height) > max_ratio * min(width, height):
        raise RefusedImageError(f"has {width} x {height} pixels: one side is more than {max_ratio} times the other")


def open_file(data: bytes | bytearray, formats: list[str], max_pixels: int, max_ratio: int) -> Image.Image:
    """Reads a file's header and checks the size in it; decodes no pixel.

    Args:
      data: Bytes of the file.
      formats: Pillow's names of the accepted formats.
      max_pixels: Largest number of pixels.
      max_ratio: Largest ratio of the longer to the shorter side.

    Raises:
      RefusedImageError: The file is no image of an accepted format, or too large.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedImageError(f"has more than {max_pixels} pixels: make it smaller") from None
    except MemoryError:
        raise
    except Exception:  # decoders raise errors of any kind on broken files
        names = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise RefusedImageError(f"is not an image that can be read: send {names}") from None
    check_size(image.size, max_pixels, max_ratio)
    return image


def to_rgb(
    image: Image.Image, max_pixels: int, max_ratio: int, *, in_place: bool = False, keeps_alpha: bool = False
) -> Image.Image:
    """Decodes the pixels of the first frame to RGB, upright, with transparency on white.

    Args:
      image: An image of which perhaps only the header was read.
      max_pixels: Largest number of pixels.
      max_ratio: Largest ratio of the longer to the shorter side.
      in_place: True if the image itself may be rotated, which saves a copy.
      keeps_alpha: True for RGBA where the image may be transparent.

    Raises:
      RefusedImageError: The file is broken or truncated, or its mode cannot become RGB.
    """
    try:
        image = _of_eight_bits(image, max_pixels, max_ratio, in_place=in_place)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            if keeps_alpha:
                return image
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except (RefusedImageError, MemoryError):
        raise
    except Exception:  # see `open_file`
        raise RefusedImageError("cannot be decoded: the file is broken or truncated") from None


def _of_eight_bits(image: Image.Image, max_pixels: int, max_ratio: int, *, in_place: bool) -> Image.Image:
    """Returns the image upright, with 8 bits per value, and its transparent color in the same bits."""
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
    # The size in a header may differ from that of the pixels.
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
    """Returns Pillow's name of the pixels of a PNG that is not decoded yet; None otherwise."""
    tiles = image.tile if isinstance(image, PngImagePlugin.PngImageFile) else []
    return tiles[0].args if tiles and isinstance(tiles[0].args, str) else None


def _of_sixteen_bits(image: Image.Image, clear: int | None) -> Image.Image:
    """Returns gray of 8 bits, transparent where the value is `clear`."""
    values = image.convert("I")
    gray = values.point(_HIGH_BYTES, "L")
    if clear is None:
        return gray
    return Image.merge("LA", (gray, values.point([255 * (value != clear) for value in range(1 << 16)], "L")))


def _low_bytes(image: Image.Image) -> Image.Image:
    """Returns the low bytes of a PNG of 16-bit colors, whose high bytes Pillow keeps; the image stays undecoded."""
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
    """Returns 255 where an RGB image has a color, and 0 elsewhere."""
    bands = zip(image.split(), color, strict=True)
    return functools.reduce(ImageChops.darker, (band.point([255 * (v == c) for v in range(256)]) for band, c in bands))


def answer(request: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], int, Iterable[bytes]]:
    """Returns width and height of an image, with its pixels uint8 [height, width, 3] on request, or the refusal.

    Args:
      request: Formats, limits, and flags for pixels, and for four channels of images that may be transparent.
      data: Bytes of the file.
    """
    limits = request["max_pixels"], request["max_ratio"]
    try:
        image = open_file(data, request["formats"], *limits)
        if not request["pixels"]:
            return {"size": image.size}, 0, ()
        image = to_rgb(image, *limits, in_place=True, keeps_alpha=request["keeps_alpha"])
    except RefusedImageError as error:
        return {"refused": str(error)}, 0, ()
    return {"size": image.size}, len(image.getbands()) * image.width * image.height, _rows(image)


def _rows(image: Image.Image) -> Iterator[bytes]:
    """Yields the pixels of a few rows at a time, which takes less memory and is faster than all at once."""
    width, height = image.size
    number = max(1, _PART_PIXELS // width)
    for y in range(0, height, number):
        yield image.crop((0, y, width, min(y + number, height))).tobytes()
