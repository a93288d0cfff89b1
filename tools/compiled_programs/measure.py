"""Compiles a model's programs and reads what the page tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxis.compilation.compiled_program import CompiledProgram
from jaxis.compilation.step_costs import StepCompiler
from jaxis.compilation.targets import parse_target
from tests.support.compiled_steps import bytes_without_attention
from tests.support.cut_models import cut_model
from tools.compiled_programs.rows import BFLOAT16, Row, Step

MIB = 1 << 20
SAMPLED = 64
"""Sequences of the sampler's program."""


def measure(model: str, target: str, width: str, tokens: Sequence[int]) -> Row:
    """Compiles the programs of steps of these numbers of tokens, until one does not compile."""
    steps: dict[str, Step] = {}
    ratio = sampler = error = None
    program = "model"
    try:
        devices = parse_target(target).devices()
        config = cut_model(model, len(devices), quantization=None if width == BFLOAT16 else width)
        compiler = StepCompiler(config, devices)
        for num_tokens in tokens:
            program = f"T={num_tokens}"
            forward = compiler.forward(num_tokens)
            steps[str(num_tokens)] = _step(compiler, forward)
            if num_tokens == 1 and devices[0].platform == "tpu":
                ratio = bytes_without_attention(forward) / compiler.reads.of_step(1)
        program = "sampler"
        sampler = sum(each.nbytes for each in compiler.sampler(SAMPLED).text.collectives) / MIB
    except Exception as failure:  # a compiler's verdict may be any
        error = f"{program}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:120]}"
    return Row(model, target, width, steps, ratio, sampler, error)


def _step(compiler: StepCompiler, program: CompiledProgram) -> Step:
    copies = [copy for copy in program.text.copies if copy.nbytes >= min(compiler.cache_bytes) // 2]
    return Step(
        in_place=program.memory.aliased >= sum(compiler.cache_bytes) and not copies,
        temporaries=program.memory.temporaries / MIB,
        exchanges=dict(Counter(each.opcode for each in program.text.collectives)),
    )
