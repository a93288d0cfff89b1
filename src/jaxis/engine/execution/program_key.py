"""The keys that name compiled programs. A key knows how its program is lowered and how it is called.

A new kind of program is a class with these methods. Executors, pipelines and groups of hosts run it without knowing
what it computes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax

from jaxis.engine.execution.program_context import ProgramContext

Compiled = Callable[..., Any]


class RunsOn(enum.Enum):
    """The pipeline stages that a program runs on.

    EVERY_STAGE: All, one after the other; each takes the hidden states that the one before hands on.
    LAST_STAGE: The last one alone.
    EACH_STAGE: All, each by itself, with the same operands. Each stage returns a list, and the lists are joined.
    """

    EVERY_STAGE = enum.auto()
    LAST_STAGE = enum.auto()
    EACH_STAGE = enum.auto()


class ProgramKey(Hashable, Protocol):
    """The name of a program: equal keys are the same program.

    Attributes:
      runs_on: The pipeline stages.
      description: Text for the user while a step waits for the program to compile, such as "the sampler".
      num_tokens: Padded tokens of a data rank whose hidden states the program takes or leaves; 0 if it does neither.
      result_tree: Tree with a leaf for each array that `run` returns; None if it returns none.
    """

    @property
    def runs_on(self) -> RunsOn: ...

    @property
    def description(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def result_tree(self) -> Any: ...

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Traces and lowers the program, in the context of its mesh. May be called from several threads."""
        ...

    @property
    def run(self) -> Callable[..., Any]:
        """Function `run(program, state, *operands)` that dispatches the program and keeps arrays for the next call.

        Its arguments: the compiled result of `lower`; the `DeviceState` of the stage, where arrays stay on the devices;
        and operands of the host, which are int32 vectors, integers and None.
        """
        ...


def lower(key: ProgramKey, context: ProgramContext) -> jax.stages.Lowered:
    """Returns the program of a key, traced and lowered."""
    with jax.set_mesh(context.mesh):
        return key.lower(context)
