"""Random images of every mode of Pillow's that has 8 bits or less and becomes RGB, transparent ones included."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from tests.support.vision_checkpoints import random_image


def _alpha(width: int, height: int, seed: int, mode: str) -> Image.Image:
    image = random_image(width, height, seed)
    image.putalpha(random_image(width, height, seed + 1, "L"))
    return image.convert("LA").convert("PA") if mode == "PA" else image.convert(mode)


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
    "": (_plain, ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")),
    "of CIELAB": (_lab, ("LAB",)),
    "with alpha": (_alpha, ("LA", "PA", "RGBA", "RGBa")),
    "with a transparent color": (_transparent, ("1", "L", "P", "P;", "RGB")),
}
IMAGES_BY_MODE: dict[str, Callable[[int, int, int], Image.Image]] = {
    f"{mode} {kind}".strip(): lambda width, height, seed, make=make, mode=mode: make(width, height, seed, mode)
    for kind, (make, modes) in _KINDS.items()
    for mode in modes
}
"""By the name of a mode: from a width, a height and a seed to an image."""
