"""A compiled program's memory, and what its text says that it costs."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxis.planning.program_text import ProgramText, read_text


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes on each device.

    Attributes:
      arguments: Of its arguments.
      outputs: Of its results, those that are updated arguments included.
      aliased: Of the arguments that it updates in place.
      temporaries: Of everything between.
      code: Of its instructions.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """What it needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class CompiledProgram:
    """A program's costs on each device.

    Attributes:
      memory: What it takes.
      text: What its instructions do.
    """

    memory: ProgramMemory
    text: ProgramText


def read_program(compiled: jax.stages.Compiled) -> CompiledProgram:
    """The costs of a program that was compiled for a TPU or GPU."""
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None
    assert text is not None
    memory = ProgramMemory(
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
    )
    return CompiledProgram(memory, read_text(text))
