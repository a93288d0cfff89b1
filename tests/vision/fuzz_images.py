"""Reads mutated image files, and says what became of them.

    python -m tests.vision.fuzz_images 20000 [SEED]

prints a line of JSON, with how many processes decoded: one that is ended by a file is followed by another. What is read
must be an RGB image within the limits; whatever else a file makes of the decoders must be a RequestError of one line.
"""

import io
import json
import resource
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter

import numpy as np
import psutil
from PIL import Image, PngImagePlugin

from jaxis.errors import RequestError
from jaxis.vision.decode import DECODERS, MAX_PIXELS, decode_image, open_image

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


def seeds(rng):
    """Files of each format, with what each has options for."""
    rgb = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize((61, 47), Image.Resampling.BICUBIC)
    rgba = rgb.copy()
    rgba.putalpha(rgb.convert("L"))
    palette = rgb.quantize(16)
    frames = [rgb.rotate(angle) for angle in (30, 60, 90)]
    exif = Image.Exif()
    exif[0x0112] = 6
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "b" * 100, zip=True)
    profile = bytes(rng.integers(0, 256, 600, dtype=np.uint8))
    files = [
        (rgb, "PNG", {}),
        (rgba, "PNG", {"pnginfo": text, "exif": exif}),
        (palette, "PNG", {"transparency": 3, "bits": 4}),
        (rgb.convert("1"), "PNG", {}),
        (Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257), "PNG", {}),
        (rgb, "PNG", {"save_all": True, "append_images": frames}),
        (rgb, "PNG", {"icc_profile": profile}),
        (rgb, "JPEG", {"quality": 70}),
        (rgb, "JPEG", {"progressive": True, "exif": exif, "icc_profile": profile}),
        (rgb.convert("L"), "JPEG", {"restart_marker_blocks": 2}),
        (rgb.convert("CMYK"), "JPEG", {"subsampling": 2}),
        (rgb, "WEBP", {"quality": 60, "exif": exif}),
        (rgba, "WEBP", {"lossless": True}),
        (rgba, "WEBP", {"quality": 50, "alpha_quality": 50}),
        (rgb, "WEBP", {"save_all": True, "append_images": frames}),
        (palette, "GIF", {}),
        (palette, "GIF", {"transparency": 2, "interlace": True, "comment": b"c" * 300}),
        (rgb, "GIF", {"save_all": True, "append_images": frames, "disposal": 2}),
    ]
    made = []
    for image, kind, options in files:
        data = io.BytesIO()
        image.save(data, kind, **options)
        made.append((kind, data.getvalue()))
    return made


def mutated(data, other, rng):
    """A file with one to three changes."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if len(data) < 2:
            break
        # Some of the changes are in what headers say.
        at = int(rng.integers(0, min(len(data), 64) if rng.random() < 0.2 else len(data)))
        size = int(rng.integers(1, 17))
        match int(rng.integers(0, 8)):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at] = int(rng.choice(INTERESTING))
            case 2:
                data[at : at + 4] = rng.integers(0, 256, 4, dtype=np.uint8).tobytes()
            case 3:
                data[at : at + 4] = int(rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 60_000))).to_bytes(4, "big")
            case 4:
                del data[at : at + size]
            case 5:
                data[at:at] = data[at : at + size]
            case 6:
                del data[max(at, 8) :]
            case 7:
                start = int(rng.integers(0, len(other)))
                data[at : at + size] = other[start : start + size]
    return bytes(data)


def fix_png_checksums(data):
    """With right checksums: what is behind them is read."""
    data, at = bytearray(data), 8
    while at + 12 <= len(data):
        size = struct.unpack_from(">I", data, at)[0]
        if at + 12 + size > len(data):
            break
        struct.pack_into(">I", data, at + 8 + size, zlib.crc32(bytes(data[at + 4 : at + 8 + size])))
        at += 12 + size
    return bytes(data)


def rss_mib():
    """Memory of this process, and of the one that decodes."""
    [decoder] = DECODERS.waiting_pids
    return [psutil.Process(pid).memory_info().rss >> 20 for pid in (None, decoder)]


def main(count, seed=0):
    rng = np.random.default_rng(seed)
    files = seeds(rng)
    started, popen = [], subprocess.Popen
    subprocess.Popen = lambda *args, **more: started.append(args) or popen(*args, **more)
    outcomes, errors, num_wrong, slowest, first_rss = Counter(), Counter(), 0, 0.0, (0, 0)
    for i in range(count):
        kind, data = files[i % len(files)]
        data = mutated(data, files[int(rng.integers(len(files)))][1], rng)
        if kind == "PNG" and rng.random() < 0.7:
            data = fix_png_checksums(data)
        start = time.perf_counter()
        try:
            image = decode_image(open_image(data, "the image"), "the image")
            assert image.mode == "RGB"
            assert image.width * image.height <= MAX_PIXELS
            outcomes[f"{kind} read"] += 1
        except RequestError as error:
            message = str(error)
            outcomes[f"{kind} refused"] += 1
            errors["size" if "pixels" in message else message.partition(":")[0]] += 1
            num_wrong += "\n" in message or "0x" in message
        slowest = max(slowest, time.perf_counter() - start)
        if i == count // 10:
            first_rss = rss_mib()
    report = {
        "files": count,
        **outcomes,
        "errors": dict(errors),
        "processes": len(started),
        "slowest_seconds": round(slowest, 3),
        "rss_mib_at_a_tenth": first_rss,
        "rss_mib_at_the_end": rss_mib(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(report))
    assert num_wrong == 0, f"{num_wrong} messages of several lines, or with an address in memory"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
