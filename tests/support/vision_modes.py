"""Random images of every mode of Pillow's that becomes RGB, transparent ones included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from tests.support.vision_checkpoints import random_image


def _alpha(width: int, height: int, seed: int, mode: str) -> Image.Image:
    image = random_image(width, height, seed)
    image.putalpha(random_image(width, height, seed + 1, "L"))
    return image.convert("LA").convert("PA") if mode == "PA" else image.convert(mode)


def _sixteen_bits(width: int, height: int, seed: int, mode: str) -> Image.Image:
    values = np.asarray(random_image(width, height, seed, "L")).astype(np.uint16) * 257
    if mode == "I":
        return Image.fromarray(values.astype(np.int32))
    return Image.frombytes(mode, (width, height), values.astype(">u2" if mode == "I;16B" else "<u2").tobytes())


def _transparent(width: int, height: int, seed: int, mode: str) -> Image.Image:
    """One of its colors is transparent, or with "P;" each of a palette in part."""
    image = random_image(width, height, seed, mode.removesuffix(";"))
    corner = image.getpixel((0, 0))
    image.info["transparency"] = bytes(range(256)) if mode.endswith(";") else corner
    return image


def _lab(width: int, height: int, seed: int, mode: str) -> Image.Image:
    return Image.merge(mode, random_image(width, height, seed).split())


def _plain(width: int, height: int, seed: int, mode: str) -> Image.Image:
    return random_image(width, height, seed, mode)


_KINDS: dict[str, tuple[Callable[[int, int, int, str], Image.Image], tuple[str, ...]]] = {
    "": (_plain, ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "F")),
    "of CIELAB": (_lab, ("LAB",)),
    "with alpha": (_alpha, ("LA", "PA", "RGBA", "RGBa")),
    "of 16 bits": (_sixteen_bits, ("I", "I;16", "I;16L", "I;16B")),
    "with a transparent color": (_transparent, ("1", "L", "P", "P;", "RGB")),
}
IMAGES_BY_MODE: dict[str, Callable[[int, int, int], Image.Image]] = {
    f"{mode} {kind}".strip(): lambda width, height, seed, make=make, mode=mode: make(width, height, seed, mode)
    for kind, (make, modes) in _KINDS.items()
    for mode in modes
}
"""By the name of a mode: from a width, a height and a seed to an image."""
