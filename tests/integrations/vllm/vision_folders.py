"""Tiny checkpoints of every family that takes images, written by the transformers of the tests, not by vLLM's."""

import json
import subprocess
import sys
import sysconfig

from tests.support.places import REPOSITORY

_SCRIPT = """
import json, sys
from pathlib import Path

own = sys.argv[1]
sys.path[:] = [path for path in sys.path if path != own] + [own]

from tests.support.vision_families import FAMILIES

for family in FAMILIES:
    folder = Path(sys.argv[2]) / family.name
    folder.mkdir()
    family.write(folder)
    facts = {"placeholder": family.placeholder, "seen_together": family.seen_together}
    (folder / "facts.json").write_text(json.dumps(facts))
"""


def write_vision_folders(folder):
    """Writes a folder for each family's name into a folder."""
    own = sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-c", _SCRIPT, own, str(folder)], cwd=REPOSITORY, check=True)


def facts_of(folder):
    """Token that stands for an image, and number of an image's tokens that see each other."""
    return json.loads((folder / "facts.json").read_text())
