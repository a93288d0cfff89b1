"""`jaxis doctor`: does this installation compute what it should on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import EXIT_ERROR, note, report_errors, write_files
from jaxis.cli.options import Debug


def doctor(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the report; made if missing.")
    ] = Path("jaxis-doctor"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Check kernels, a model and its speed on this machine's devices, and write a report to send.

    Runs each kernel against its definition in float64, and the embedded model, whose answers are known word for word.
    Times a decode beside the least time that the device's data sheet allows.
    Writes doctor.md and doctor.json. Takes a minute or two, and nothing is sent anywhere.
    Exits with 1 if something is wrong.

    \b
    [bold]Examples[/bold]
      jaxis doctor
      jaxis doctor --output report --json | jq .passed
    """
    with report_errors(debug=debug):
        from rich.console import Console

        from jaxis.cli.env import collect
        from jaxis.doctor.check import Check
        from jaxis.doctor.examination import examine

        def show(check: Check) -> None:
            if not as_json:
                mark = "ok    " if check.passed else "FAILED"
                print(f"{mark} {check.area}: {check.name}: {check.detail} ({check.seconds:.1f} s)", flush=True)

        with Console(stderr=True).status("Starting") as status:
            found = examine(collect(), on_start=lambda case: status.update(f"{case.area}: {case.name}"), on_check=show)
        files = {"doctor.md": found.to_markdown(), "doctor.json": found.to_json()}
        write_files(output, files)
        print(found.to_json() if as_json else found.subject)
        wrong, written = sum(not check.passed for check in found.checks), [str(output / name) for name in files]
        note(f"{wrong or 'none'} of {len(found.checks)} checks failed; wrote {' and '.join(written)}")
    if not found.passed:
        raise typer.Exit(EXIT_ERROR)
