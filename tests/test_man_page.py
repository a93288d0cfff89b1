"""The manual page has every command and option, and is what troff reads."""

import re
import shutil
import subprocess

import pytest
import typer

from jaxis.cli.main import app
from tools.man_page import page


def commands(group, name):
    for child, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {child}")
        else:
            yield f"{name} {child}", command


def test_the_page_has_every_command_and_its_options():
    parts = re.split(r"^\.SH (.*)$", page(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name, command in commands(typer.main.get_command(app), "jaxis"):
        section = sections[name.upper().replace("-", "\\-")]
        for parameter in command.params:
            for option in parameter.opts if not parameter.hidden else []:
                if option.startswith("-"):
                    assert re.search(
                        rf"^\.B .*{re.escape(option.replace('-', chr(92) + '-'))}\b", section, re.MULTILINE
                    )


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_troff_has_nothing_to_warn_of():
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8"], input=page(), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "--max-tokens" in re.sub(r"\x1b\[\d*m|.\x08", "", done.stdout)
    assert "[bold]" not in done.stdout
