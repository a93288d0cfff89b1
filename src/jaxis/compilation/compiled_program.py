"""A compiled program's memory, and the costs in its text."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxis.compilation.program_text import ProgramText, read_text


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of a program on each device; `aliased` are arguments that it updates in place, which are outputs too."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Bytes that it needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class CompiledProgram:
    """A program's costs on each device."""

    memory: ProgramMemory
    text: ProgramText


def read_program(compiled: jax.stages.Compiled) -> CompiledProgram:
    """Reads the costs of a program that was compiled for a TPU or GPU."""
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
