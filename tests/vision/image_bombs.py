"""Files that cost far more than they are long, or lie about what they hold: how long each takes, and what memory.

    python -m tests.vision.image_bombs

prints a line of JSON for each, which is read by processes of its own: what became of it, the seconds and the
processor's seconds that this took, and by how many MiB the process that asked, and the one that decoded, were then
larger than ever before.
"""

import io
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import psutil
from PIL import Image

from jaxis.errors import RequestError
from jaxis.vision.decode import DECODERS, FORMATS, MAX_FILE_BYTES, decode_image, open_image


def chunk(kind, content):
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, *before, rows=None, color=2, depth=8, data=b"\0"):
    """A PNG whose header claims a size, with other chunks before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    pixels = zlib.compress(data * (rows or 1), 1)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), *before, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


def gif(count):
    """A GIF of so many frames."""
    image = Image.new("P", (8, 8))
    image.putpalette([0, 0, 0, 255, 255, 255])
    data = file_of(image, "GIF")
    first = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:first] + data[first:-1] * count + b";"


def animation(kind, count):
    """An animation of so many frames."""
    frames = [Image.new("RGB", (8, 8), (i % 251, i // 251, 0)) for i in range(count)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def file_of(image, kind, **options):
    """A file of an image."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def bombs(side=20_000):
    """By name: a file, and whether it is an image that is read.

    Args:
      side: Side of the image that is all there, which takes seconds to make.
    """
    gif_lie = bytearray(file_of(Image.new("P", (8, 8)), "GIF"))
    gif_lie[6:10] = struct.pack("<HH", 65535, 65535)
    jpeg = file_of(Image.new("RGB", (64, 64)), "JPEG")
    jpeg_lie = bytearray(jpeg)
    at = jpeg.index(b"\xff\xc0")
    jpeg_lie[at + 5 : at + 9] = struct.pack(">HH", 65535, 65535)
    small_lie = bytearray(jpeg)
    small_lie[at + 5 : at + 9] = struct.pack(">HH", 6000, 6000)
    webp = bytearray(file_of(Image.new("RGB", (64, 64)), "WEBP", lossless=True))
    webp[21:25] = struct.pack("<I", (16383) | (16383 << 14))
    zeros = bytes(100_000_000)
    text = b"a\0\0" + zlib.compress(zeros, 1)
    metadata = png(8, 8, *[chunk(b"zTXt", text)] * 20, rows=8, data=bytes(25))
    profile = png(8, 8, chunk(b"iCCP", text), rows=8, data=bytes(25))
    return {
        "a PNG that claims 60,000 x 60,000 pixels": (png(60_000, 60_000), False),
        f"a PNG of {side:,} x {side:,} zeros": (
            png(side, side, color=0, depth=1, rows=side, data=bytes(1 + side // 8)),
            False,
        ),
        "a PNG that claims 1 x 1 pixels and has a million rows": (
            png(1, 1, rows=1_000_000, data=bytes(4)),
            True,
        ),
        "a PNG that claims 6,000 x 6,000 pixels and has one": (png(6000, 6000, data=bytes(4)), False),
        "20 compressed texts of 100 MB": (metadata, False),
        "a compressed colour profile of 100 MB": (profile, False),
        "a PNG cut off": (png(512, 512, rows=512, data=bytes(1537))[:-30], False),
        "a JPEG that claims 65,535 x 65,535 pixels": (bytes(jpeg_lie), False),
        "a JPEG that claims 6,000 x 6,000 pixels and has 64 x 64": (bytes(small_lie), True),
        "a GIF that claims 65,535 x 65,535 pixels": (bytes(gif_lie), False),
        "a WEBP that claims 16,384 x 16,384 pixels": (bytes(webp), False),
        "a GIF of 10,000 frames": (gif(10_000), True),
        "an animated WEBP of 500 frames": (animation("WEBP", 500), True),
        "an animated PNG of 500 frames": (animation("PNG", 500), True),
        "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg' width='60000' height='60000'/>", False),
        "an EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60000 60000\n", False),
        "a TIFF": (file_of(Image.new("RGB", (64, 64)), "TIFF"), False),
        "base64 with line ends": ("data:image/png;base64," + "AAAA\n" * 100_000, False),
        "a data URL without a type": ("data:;base64," + "AAAA" * 100_000, False),
        "a file of more than 32 MiB": (bytes(MAX_FILE_BYTES + 1), False),
    }


def largest():
    """The images that cost most, among those that are read."""
    side = 6300
    return {
        "a PNG of 6,300 x 6,300 zeros": (png(side, side, rows=side, data=bytes(3 * side + 1)), True),
        "a transparent one": (png(side, side, color=6, rows=side, data=bytes(4 * side + 1)), True),
    }


def read(data):
    """Outcome of a file: its size, or the error; seconds, and those of the processor, also where it is decoded."""
    started, began = time.perf_counter(), processor_seconds()
    try:
        outcome = "{} x {}".format(*decode_image(open_image(data, "the image"), "the image").size)
    except RequestError as error:
        outcome = str(error)
    return outcome, time.perf_counter() - started, processor_seconds() - began


def processor_seconds():
    """Time of this process, and of the one that decodes, which are counted in hundredths."""
    times = [psutil.Process(pid).cpu_times() for pid in DECODERS.waiting_pids]
    return time.process_time() + sum(each.user + each.system for each in times)


def read_alone(data):
    """The same in a process of its own, with MiB."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data if isinstance(data, bytes) else data.encode())
        file.flush()
        command = [sys.executable, "-W", "ignore", "-m", "tests.vision.image_bombs", file.name]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def main(arguments):
    if not arguments:
        for name, (data, _) in (bombs(60_000) | largest()).items():
            outcome, seconds, processor_seconds, mib, decoder_mib = read_alone(data)
            report = {"name": name, "kib": len(data) >> 10, "ms": round(1e3 * seconds, 1)}
            report |= {"processor_ms": round(1e3 * processor_seconds, 1), "mib": mib, "decoder_mib": decoder_mib}
            print(json.dumps(report | {"outcome": outcome}), flush=True)
        return
    data = Path(arguments[0]).read_bytes()
    for kind in FORMATS:
        read(file_of(Image.new("RGB", (8, 8)), kind))
    [pid] = DECODERS.waiting_pids
    peaks = [peak_kib("self"), peak_kib(pid)]
    result = read(data.decode() if data.startswith(b"data:") else data)
    # After a large image, the process that decoded it has ended.
    most = peak_kib(pid) if pid in DECODERS.waiting_pids else resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps([*result, (peak_kib("self") - peaks[0]) >> 10, (most - peaks[1]) >> 10]))


def peak_kib(pid):
    """The most memory that a process has had (Linux)."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1:])
