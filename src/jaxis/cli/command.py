"""A command of `jaxis` as the module that has it registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer

from jaxis.cli.console import report_errors, wants_json
from jaxis.rooms import check_room, has_room


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands.

    Attributes:
      name: Name on the command line.
      run: Function of the command, or the group.
      room: Room of jaxis that does its work and may not be installed; "" for none.
      settings: Arguments of typer's `command`.
    """

    name: str
    run: Callable[..., None] | typer.Typer
    room: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, app: typer.Typer) -> None:
        """Adds the command to an application; without its room, a hidden one that only says so."""
        if self.room and not has_room(self.room):
            app.command(self.name, hidden=True, context_settings=_ANYTHING)(self._refuse)
        elif isinstance(self.run, typer.Typer):
            app.add_typer(self.run, name=self.name)
        else:
            app.command(self.name, **self.settings)(self.run)

    def _refuse(self, context: typer.Context) -> None:
        command = self.name if wants_json(self.name, context.args) else ""
        with report_errors(debug=False, command=command, as_json=bool(command)):
            check_room(self.room, f"jaxis {self.name}")


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
OTHER_ARGUMENTS = {"context_settings": {"allow_extra_args": True}}
"""Settings of a command that says itself what is wrong with further arguments."""
FIELDS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Settings of a command that takes the fields of its configuration as options."""


def apply_overrides(values: dict[str, Any], arguments: list[str]) -> None:
    """Writes `--section.field value` and `--section.field=value` into a configuration; values are YAML.

    Raises:
      typer.BadParameter: An argument has another shape.
    """
    from jaxis.config.yaml_file import parse_yaml

    words = iter(arguments)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise typer.BadParameter(
                f"{word!r} is not an option: give --config FILE, or fields such as --generation.seed 7"
            )
        if not equals:
            text = next(words, None)
            if text is None:
                raise typer.BadParameter(f"{word} needs a value")
        *sections, field = name.split(".")
        target = values
        for section in sections:
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                raise typer.BadParameter(f"{word}: {section} holds no fields")
        target[field.replace("-", "_")] = parse_yaml(text, word)
