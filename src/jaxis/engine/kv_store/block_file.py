"""A block as a file: a header that says which block it is, its bytes, and a checksum of both."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from pathlib import Path

import numpy as np

_MAGIC = b"JAXISKV1"
_HEADER = struct.Struct("<8sI32sQ")  # magic, group, digest, bytes of the block
_CHECKSUM_BYTES = hashlib.sha256().digest_size
OVERHEAD_BYTES = _HEADER.size + _CHECKSUM_BYTES


class DamagedFileError(Exception):
    """A file is not the block that its name says, or not all of it."""


def write_block(path: Path, group: int, digest: bytes, block: np.ndarray) -> None:
    """Writes a file aside and renames it, so that nobody finds half of one.

    Args:
      path: The file.
      group: The block's group.
      digest: What it is found by.
      block: uint8 [N].

    Raises:
      OSError: It cannot be written.
    """
    header = _HEADER.pack(_MAGIC, group, digest, block.nbytes)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "xb", opener=_private) as file:
            file.write(header)
            file.write(block.data)
            file.write(_checksum(header, block))
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def read_block(path: Path, group: int, digest: bytes, num_bytes: int) -> np.ndarray:
    """The block, uint8 [N], in memory of its own.

    Args:
      path: The file.
      group: The block's group.
      digest: What it is found by.
      num_bytes: Its bytes.

    Raises:
      OSError: It cannot be read; FileNotFoundError if it is not there.
      DamagedFileError: It is something else.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes + OVERHEAD_BYTES:
            raise DamagedFileError(f"{path.name} is not a block of {num_bytes} bytes")
        header, block = file.read(_HEADER.size), np.empty(num_bytes, np.uint8)
        if file.readinto(block.data) != num_bytes:
            raise DamagedFileError(f"{path.name} was cut off while it was read")
        checksum = file.read(_CHECKSUM_BYTES)
    if header != _HEADER.pack(_MAGIC, group, digest, num_bytes) or checksum != _checksum(header, block):
        raise DamagedFileError(f"{path.name} is damaged")
    return block


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _checksum(header: bytes, block: np.ndarray) -> bytes:
    checksum = hashlib.sha256(header)
    checksum.update(block.data)
    return checksum.digest()
