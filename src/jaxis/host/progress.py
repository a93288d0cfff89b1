"""Progress display for loading, compiling and generating. On stderr, and only if that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class _OnceTotalIsKnown(ProgressColumn):
    """A column that is hidden until the total is known; before, it would read "0/? bytes"."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> Any:
        return Text() if task.total is None else self._column.render(task)


class ProgressDisplay:
    """Progress lines on stderr."""

    def __init__(self, enabled: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not enabled)
        self._enabled = enabled and self._console.is_terminal
        self._live: Progress | None = None
        self._num_silent = 0

    def note(self, message: str) -> None:
        """Prints a permanent line, terminal or not."""
        self._console.print(message, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def loading(self, what: str) -> Iterator[Any]:
        """Shows a bar of bytes; yields `update(done, total)`."""
        with self.working(f"Loading {what}") as update:
            yield update

    @contextmanager
    def working(self, description: str) -> Iterator[Any]:
        """Shows a bar of bytes under any description; yields `update(done, total)`."""
        with self._progress(_OnceTotalIsKnown(DownloadColumn())) as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def counting(self, description: str) -> Iterator[Any]:
        """Shows a bar of steps under any description; yields `update(done, total)`."""
        with self._progress(_OnceTotalIsKnown(MofNCompleteColumn())) as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def generating(self, num_requests: int) -> Iterator[Any]:
        """Shows a bar of requests; yields `update(finished, output_tokens)`."""
        with self._progress(MofNCompleteColumn(), TextColumn("{task.fields[rate]}")) as progress:
            task = progress.add_task("Generating", total=num_requests, rate="")

            def update(finished: int, output_tokens: int) -> None:
                elapsed = progress.tasks[0].elapsed or 0.0
                rate = f"{output_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
                progress.update(task, completed=finished, rate=rate)

            yield update

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Shows nothing inside: a spinner beside streamed text would erase it."""
        self._num_silent += 1
        try:
            yield
        finally:
            self._num_silent -= 1

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        if not self._enabled or self._num_silent:
            yield
        elif self._live is not None:
            # Only one live display is possible, and a bar is already shown.
            task = self._live.tasks[0]
            description = task.description
            self._live.update(task.id, description=f"Compiling {what}")
            try:
                yield
            finally:
                self._live.update(task.id, description=description)
        else:
            with self._console.status(f"Compiling {what}"):
                yield

    @contextmanager
    def _progress(self, *columns: Any) -> Iterator[Progress]:
        shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeElapsedColumn())
        with Progress(*shown, console=self._console, transient=True, disable=not self._enabled) as progress:
            self._live = progress
            try:
                yield progress
            finally:
                self._live = None
