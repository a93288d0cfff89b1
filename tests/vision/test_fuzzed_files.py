"""Mutated files of each format: each is read or refused in one line, and none ends the process or keeps memory."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("count", [360, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files_are_read_or_refused(count):
    command = [sys.executable, "-W", "ignore", "-m", "tests.vision.fuzz_images", str(count)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    report = json.loads(ended.stdout)
    assert all(report[f"{kind} read"] and report[f"{kind} refused"] for kind in ("PNG", "JPEG", "WEBP", "GIF"))
    assert report["processes"] == 1  # no file has ended one
    for begin, end in zip(report["rss_mib_at_a_tenth"], report["rss_mib_at_the_end"], strict=True):
        assert end - begin < 64
    print(ended.stdout)
