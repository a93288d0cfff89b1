"""examples/start.ipynb prints what it shows."""

import json
import os
import sys
from pathlib import Path

from tests.support.host_processes import free_port
from tests.support.places import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "start.ipynb"


def test_the_notebook_prints_what_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # it starts `jaxis serve`
    namespace = {"__name__": "notebook"}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"]).replace("8123", str(free_port()))
        if cell["cell_type"] != "code" or source.startswith("%pip"):
            continue
        exec(compile(source, NOTEBOOK.name, "exec"), namespace)
        assert capsys.readouterr().out == "".join(line for output in cell["outputs"] for line in output["text"])
