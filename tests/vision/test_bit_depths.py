"""Pixels of more and of less than 8 bits, against files of known values; 16 bits by `value >> 8`, as libpng does it."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxis.vision.decode import decode_image, open_image

WIDTH, HEIGHT = 13, 5
GRAY, RGB, GRAY_ALPHA, RGBA = 0, 2, 4, 6  # color types
CHANNELS = {GRAY: 1, RGB: 3, GRAY_ALPHA: 2, RGBA: 4}
FORMATS = [(GRAY, bits) for bits in (1, 2, 4, 8, 16)] + [
    (kind, bits) for kind in (RGB, GRAY_ALPHA, RGBA) for bits in (8, 16)
]


def read(source):
    return np.asarray(decode_image(open_image(source, "the image"), "the image"))


def png(values, bits, color, *, clear=None, orientation=None):
    """A PNG of values [height, width, channels]."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = values.shape
    binary = (values.reshape(height, -1)[..., None] >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(binary.reshape(height, -1).astype(np.uint8), axis=1)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))]
    if clear is not None:
        parts.append(chunk(b"tRNS", np.asarray(clear, ">u2").tobytes()))
    if orientation is not None:
        entry = struct.pack(">HHIHH", 0x112, 3, 1, orientation, 0)
        parts.append(chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01" + entry + b"\0\0\0\0"))
    parts.append(chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def shown(values, bits, clear=None):
    """What a viewer shows of the values, on white."""
    eight = values >> 8 if bits == 16 else values * 255 // ((1 << bits) - 1)
    channels = values.shape[-1]
    color = np.repeat(eight[..., :1], 3, -1) if channels < 3 else eight[..., :3]
    if channels in (2, 4):
        share = eight[..., -1:] / 255
        return color * share + 255 * (1 - share)
    return color if clear is None else np.where((values == clear).all(-1, keepdims=True), 255, color)


def random_values(color, bits, seed=0):
    """Of 16 bits, many that differ in the low byte alone."""
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 1 << bits, (HEIGHT, WIDTH, CHANNELS[color]))
    if bits == 16:
        values[1:] = (values[:1] & 0xFF00) | draw.integers(0, 3, values[1:].shape)
        values[0, 0], values[0, 1] = 0, 65535
    return values


@pytest.mark.parametrize(("color", "bits"), FORMATS)
def test_every_depth_of_a_png_is_seen_at_its_brightness(color, bits):
    for seed in range(20):
        values = random_values(color, bits, seed)
        # Pillow rounds where it puts half-transparent pixels on white.
        tolerance = 1 if color in (GRAY_ALPHA, RGBA) else 0
        np.testing.assert_allclose(read(png(values, bits, color)), shown(values, bits), atol=tolerance)


@pytest.mark.parametrize(("color", "bits"), [each for each in FORMATS if each[0] in (GRAY, RGB)])
@pytest.mark.parametrize("opened", [False, True], ids=["file", "opened by Pillow"])
def test_the_transparent_color_is_compared_in_the_bits_of_the_file(color, bits, opened):
    for seed in range(20):
        values = random_values(color, bits, seed)
        clear = values[2, 3].copy()
        values[0, 5] = values[4, 1] = clear
        data = png(values, bits, color, clear=clear)
        found = read(Image.open(io.BytesIO(data)) if opened else data)
        np.testing.assert_array_equal(found, shown(values, bits, clear))


@pytest.mark.parametrize(("color", "bits"), [(GRAY, 16), (RGB, 16), (GRAY, 2)])
def test_orientation_is_applied_to_the_transparent_color_too(color, bits):
    values = random_values(color, bits)
    clear = values[2, 3].copy()
    found = read(png(values, bits, color, clear=clear, orientation=6))
    np.testing.assert_array_equal(found, np.rot90(shown(values, bits, clear), -1))


def tiff(values, order, kind="H"):
    """A TIFF of gray values [height, width] of 16 bits."""
    data = values.astype(np.dtype("u2").newbyteorder(order)).tobytes()
    fields = [(256, 4, WIDTH), (257, 4, HEIGHT), (258, 3, 16), (259, 3, 1), (262, 3, 1)]
    fields += [(273, 4, 8), (277, 3, 1), (278, 4, HEIGHT), (279, 4, len(data))]
    entries = [
        struct.pack(f"{order}HHI", tag, type_, 1)
        + (struct.pack(f"{order}I", value) if type_ == 4 else struct.pack(f"{order}HH", value, 0))
        for tag, type_, value in fields
    ]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + b"\0" * 4


def pgm(values, magic):
    return f"{magic} {WIDTH} {HEIGHT} 65535 ".encode() + values.astype(">u2").tobytes()


@pytest.mark.parametrize("kind", ["TIFF <", "TIFF >", "PGM", "PPM", "I;16", "I;16L", "I;16B", "I;16N"])
def test_images_of_16_bits_that_pillow_opens_are_seen_at_their_brightness(kind):
    values = random_values(RGB if kind == "PPM" else GRAY, 16)
    gray = values[..., 0]
    if kind.startswith("TIFF"):
        image = Image.open(io.BytesIO(tiff(gray, kind[-1])))
    elif kind in ("PGM", "PPM"):
        image = Image.open(io.BytesIO(pgm(values, "P5" if kind == "PGM" else "P6")))
    else:
        image = Image.frombytes(kind, (WIDTH, HEIGHT), gray.astype({"I;16B": ">u2"}.get(kind, "<u2")).tobytes())
    # Pillow scales colors of a PPM itself, and rounds.
    np.testing.assert_allclose(read(image), shown(values, 16), atol=kind == "PPM")
