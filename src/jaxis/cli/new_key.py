"""`jaxis new-key`: an API key for `jaxis serve --api-key-file`."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import note, report_errors
from jaxis.cli.options import Debug
from jaxis.host.extras import check_extra


def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; logs and metrics say it.")],
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Most requests that generate.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Most tokens of prompts and answers together.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="The best of its requests; lower values are served first.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="May change the server's state, such as empty its prefix cache.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Make an API key.

    The key is shown once, on stderr. Its entry for the file, which has only its digest, goes to stdout.

    \b
    [bold]Examples[/bold]
      jaxis new-key alice >> keys.yaml
      jaxis new-key ci --requests-per-minute 60 --tokens-per-minute 100000 >> keys.yaml
      jaxis serve --api-key-file keys.yaml
    """
    with report_errors(debug=debug):
        check_extra("server", "jaxis new-key")
        from jaxis.server.http.api_keys import new_api_key, to_yaml

        text, key = new_api_key(
            name,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            priority=priority,
            admin=admin,
        )
        print(to_yaml(key), end="", flush=True)
        note(text)


COMMANDS = (Command("new-key", new_key),)
