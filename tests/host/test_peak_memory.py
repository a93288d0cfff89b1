"""The peak of a process's memory."""

import subprocess
import sys


def test_the_peak_stays_when_the_memory_is_given_back():
    """In a process of its own, which is smaller than one that has run tests: the block is twice its size."""
    code = (
        "from jaxis.host.machine import peak_memory_bytes\n"
        "before = peak_memory_bytes()\n"
        "block = b'x' * (before + (64 << 20))\n"
        "size = len(block)\n"
        "del block\n"
        "assert size <= peak_memory_bytes() < before + size + (64 << 20)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
