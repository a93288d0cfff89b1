from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import RequestError
from jaxis.host.limited_process import Limit, LimitedProcesses, LimitExceededError, ProcessLimits

# Far more than a conversation of 8 MB needs, which takes half a second.
MAX_SECONDS = 10  # of processor time
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 26
_CHARACTER_BYTES = 12  # of JSON, at most

# Only the processes import the worker, and Jinja with it.
PROCESSES = LimitedProcesses(Path(__file__).with_name("template_worker.py"), large_bytes=6 << 20)


class TemplateSyntaxError(RequestError):
    """A template that Jinja cannot read."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template with JSON values, in a process with limits on time, memory and output.

    Raises RequestError if the template is invalid (TemplateSyntaxError), raises an error, or exceeds a limit.
    """
    request = {"template": template, "variables": variables, "max_characters": MAX_CHARACTERS}
    limits = ProcessLimits(MAX_SECONDS, MAX_MEMORY_BYTES, _CHARACTER_BYTES * MAX_CHARACTERS)
    try:
        answer, _ = PROCESSES.ask(request, limits)
    except LimitExceededError as error:
        what = _LIMITS[error.limit]()
        raise RequestError(f"the chat template {what}: use the template of the model's publisher") from None
    if "text" in answer:
        return answer["text"]
    if answer["kind"] == "refused":
        raise RequestError(f"the chat template refused the conversation: {answer['reason']}")
    raise TemplateSyntaxError(f"the chat template has a syntax error in line {answer['line']}: {answer['reason']}")


# What a template did that was ended by a limit.
_LIMITS: Mapping[Limit, Callable[[], str]] = {
    "time": lambda: f"takes more than {MAX_SECONDS} s of processor time",
    "memory": lambda: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
    "output": lambda: f"writes more than {MAX_CHARACTERS} characters",
    "ended": lambda: "ended the process that renders it",
}
