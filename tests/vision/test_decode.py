"""Reading images: right pixels from every mode and orientation, and one line for whatever is no image or too large."""

import base64
import io
import struct
import zlib
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer
from jaxis.vision import decode
from jaxis.vision.processors import read_processor
from tests.support.vision_checkpoints import (
    LONGEST,
    MERGE,
    PATCH,
    random_image,
    reference_processor,
    write_processor,
    write_tokenizer,
)
from tests.vision.vision_modes import IMAGES_BY_MODE


def read(source):
    return decode.decode_image(decode.open_image(source, "the image"), "the image")


def file_of(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def png(width, height, data=b""):
    """A PNG whose header claims a size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", IMAGES_BY_MODE)
def test_every_mode_becomes_rgb_as_in_the_reference(mode):
    image = IMAGES_BY_MODE[mode](24, 16, 0)
    np.testing.assert_array_equal(np.asarray(read(image)), convert_to_rgb(image, return_numpy=True))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "JPEG", "WEBP"])
def test_files_of_every_mode_become_rgb_as_in_the_reference(kind):
    modes = set()
    for make in IMAGES_BY_MODE.values():
        image = make(24, 16, 0)
        try:
            data = file_of(image, kind)
        except (OSError, KeyError, ValueError):
            continue  # the format has no such mode
        written = Image.open(io.BytesIO(data))
        np.testing.assert_array_equal(np.asarray(read(data)), convert_to_rgb(written, return_numpy=True))
        modes.add((written.mode, "transparency" in written.info))
    expected = {
        "PNG": {("1", False), ("1", True), ("L", True), ("LA", False), ("P", False), ("P", True), ("RGB", True)}
        | {("L", False), ("RGB", False), ("RGBA", False)},
        "GIF": {("P", False), ("P", True)},
        "JPEG": {("L", False), ("RGB", False), ("CMYK", False)},
        "WEBP": {("RGB", False), ("RGBA", False)},
    }
    assert modes >= expected[kind]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("La", "mode La, which does not become RGB: convert it to LA"),
        ("I", "mode I, whose values have no range: scale them"),
        ("F", "mode F, whose values have no range: scale them"),
    ],
)
def test_a_mode_that_does_not_become_rgb_is_named(mode, message):
    with pytest.raises(RequestError, match=message):
        read(Image.new(mode, (4, 4)))


def test_what_is_transparent_is_white():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    for data in (file_of(palette, "GIF", transparency=1), file_of(Image.new("RGBA", (4, 4), (9, 9, 9, 0)))):
        assert np.asarray(read(data)).min() == 255


def test_orientation_is_applied():
    image = random_image(20, 10)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        upright = np.asarray(read(file_of(image, exif=exif)))
        operations = {2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 6: lambda x: np.rot90(x, -1)}
        operations |= {1: lambda x: x, 5: lambda x: x.transpose(1, 0, 2), 8: np.rot90}
        operations[7] = lambda x: np.rot90(x.transpose(1, 0, 2), 2)
        np.testing.assert_array_equal(upright, operations[orientation](np.asarray(image)))


def test_of_an_animation_the_first_frame_is_read():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert np.asarray(read(data))[0, 0].tolist() == [255, 0, 0]


DATA = file_of(random_image(12, 9))
PLAIN = base64.b64encode(DATA).decode()
LINES = base64.encodebytes(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PLAIN}",
        f"data:;base64,{LINES}",
        f"data:image/png;base64,{LINES}".replace("\n", "\r\n"),
        f"data:image/png;base64,{PLAIN}\n",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64, {PLAIN[:9]} \f{PLAIN[9:]}",
        f"DATA:image/png;base64,{PLAIN}",
        f" \ndata:image/png;BASE64,{PLAIN}",
        f"data:image/png; base64 ,{PLAIN}",
        f"data:image/png;charset=utf-8;name=a.png; base64,{PLAIN}",
        f"data:image/png;base64,{quote(PLAIN, safe='')}",
        f"data:image/png;base64,{quote(LINES, safe='')}#top",
    ],
    ids=range(12),
)
def test_data_urls_are_read_as_browsers_read_them(url):
    np.testing.assert_array_equal(np.asarray(read(url)), np.asarray(read(DATA)))


def test_data_urls_paths_and_bytes_are_the_same_image(tmp_path):
    data = file_of(random_image(12, 9))
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    images = [np.asarray(read(source)) for source in (data, url, tmp_path / "a.png", str(tmp_path / "a.png"))]
    assert all(np.array_equal(image, images[0]) for image in images)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (png(60_000, 60_000), "more than 40000000"),
        (png(9_000, 9_000), "9000 x 9000 pixels, more than 40000000"),
        (png(300, 1, b"\0" * 901), "one side is more than 200 times the other"),
        (png(16, 16, b"\0"), "broken or truncated"),
        (file_of(random_image(64, 64), "JPEG")[:-200], "broken or truncated"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image that can be read"),
        (file_of(random_image(8, 8), "BMP"), "not an image that can be read"),
        (b"", "not an image that can be read"),
        (b"\0" * (32 * 2**20 + 1), "more than 32.0 MiB"),
        ("http://169.254.169.254/latest/meta-data", "nothing is fetched from addresses"),
        ("HTTPS://example.com/a.png", "nothing is fetched from addresses"),
        ("file:///etc/passwd", "nothing is fetched from addresses"),
        ("data:image/png,abc", "data:image/png;base64"),
        ("data:image/png;base64,a\nb=", "not valid base64"),
        ("DATA:image/png;base64,aa-_", "not valid base64"),
        ("data:image/png;base64,aGk=aGk=", "not valid base64"),
        ("/nowhere/a.png", "no readable file"),
        ("a\0b", "no readable file"),
    ],
    ids=range(19),
)
def test_what_cannot_be_read_is_one_line(source, message):
    with pytest.raises(RequestError) as error:
        read(source)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "0x" not in str(error.value)


def test_resized_pixels_and_scales_are_those_of_the_reference(tmp_path):
    write_tokenizer(tmp_path)
    write_processor(tmp_path)
    ours, theirs = read_processor(tmp_path, Tokenizer.from_path(tmp_path)), reference_processor()
    scale, rng = ours.pixel_scale, np.random.default_rng(0)
    for i in range(300):
        width, height = (int(2 ** rng.uniform(0, 8)) for _ in range(2))
        if max(width, height) > (LONGEST - 1) * min(width, height):
            continue  # of which the reference leaves no pixel
        image = random_image(width, height, seed=i)
        expected = theirs(image, patch_size=PATCH * MERGE, return_tensors="np")["pixel_values"][0]
        [pixels] = ours.views(read(image))
        assert pixels.shape[:2] == expected.shape[1:]
        unscaled = expected.transpose(1, 2, 0) * scale.std + scale.mean
        np.testing.assert_array_equal(pixels, np.rint(unscaled * 255).astype(np.uint8))
        scaled = (pixels * scale.factor - scale.mean) / scale.std
        np.testing.assert_allclose(scaled.transpose(2, 0, 1), expected, rtol=0, atol=1e-6)
    assert max(pixels.shape) <= LONGEST
