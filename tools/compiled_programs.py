"""Writes docs/compiled-programs.md: what the step programs of each family need, as compilers of accelerators have them.

  JAX_PLATFORMS=cpu python -m tools.compiled_programs v6e-8 v6e-1
  JAX_PLATFORMS=cpu python -m tools.compiled_programs h100x1 --models qwen3-0.6b,mixtral-8x7b

Run it from the repository's root where the target's compiler is installed (`make test-compile` makes such
environments); one kind of GPU a process. Rows of other targets and models stay as docs/compiled-programs.json has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from dataclasses import dataclass

from jaxis.planning.compiled_program import CompiledProgram
from jaxis.planning.step_costs import StepCompiler
from jaxis.planning.targets import parse_target
from tests.support.compiled_steps import FAMILIES, bytes_without_attention
from tests.support.cut_models import NUM_LAYERS, cut_model
from tests.support.places import REPOSITORY

PAGE = REPOSITORY / "docs" / "compiled-programs.md"
ROWS = PAGE.with_suffix(".json")
TOKENS = 64
MIB = 1 << 20
HEAD = f"""# Compiled programs

What compilers say of jaxis's programs for accelerators, on a machine that has none: libtpu for TPUs, XLA's CUDA plugin
for NVIDIA GPUs. `python -m tools.compiled_programs` writes this page. Each model has {NUM_LAYERS} layers of its
published sizes, in bfloat16. Nothing here has run on an accelerator: a program that compiles fits, and copies and
exchanges what it is seen to, but how fast it is only the machine can tell.

- In place: whether a step of {TOKENS} tokens updates all KV caches in place, and copies none.
- Temporaries: memory of that step beside weights and caches, on each device, in MiB.
- Decode bytes: what a step of one token reads from and writes to HBM, without attention, over the weights that it has
  to read. Programs for GPUs do not say which memory an array is in.
- Exchanges: between the devices, of the step of {TOKENS} tokens. Two all-reduces a layer and one for the embeddings are
  needed.
- Sampler: what is exchanged before sampling for {TOKENS} sequences, on each device, in MiB.

"""


@dataclass(frozen=True)
class Row:
    """What is known of a model on a target.

    Attributes:
      model: Its config's name.
      target: The machine.
      error: Why it does not compile; None if it does.
      in_place: Whether all caches are updated in place.
      temporaries: MiB.
      decode_ratio: Bytes of a decode over those of the weights; None for GPUs, whose text does not tell memories apart.
      exchanges: Opcode -> how many.
      sampler_exchange: MiB.
    """

    model: str
    target: str
    error: str | None = None
    in_place: bool = False
    temporaries: float = 0
    decode_ratio: float | None = None
    exchanges: dict[str, int] = dataclasses.field(default_factory=dict)
    sampler_exchange: float = 0


def measure(model: str, target: str) -> Row:
    """Compiles a model's programs."""
    devices = parse_target(target).devices()
    try:
        steps = StepCompiler(cut_model(model, len(devices)), devices)
        step, decode, sampler = steps.forward(TOKENS), steps.forward(1), steps.sampler(TOKENS)
    except Exception as error:  # a compiler's verdict may be any
        return Row(model, target, error=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    ratio = bytes_without_attention(decode) / steps.reads.of_step(1) if devices[0].platform == "tpu" else None
    return Row(
        model,
        target,
        in_place=_is_in_place(steps, step),
        temporaries=step.memory.temporaries / MIB,
        decode_ratio=ratio,
        exchanges=dict(Counter(each.opcode for each in step.text.collectives)),
        sampler_exchange=sum(each.nbytes for each in sampler.text.collectives) / MIB,
    )


def _is_in_place(steps: StepCompiler, program: CompiledProgram) -> bool:
    copies = [copy for copy in program.text.copies if copy.nbytes >= min(steps.cache_bytes) // 2]
    return program.memory.aliased >= sum(steps.cache_bytes) and not copies


def page(rows: list[Row]) -> str:
    """The page."""
    lines = [HEAD]
    for target in dict.fromkeys(row.target for row in rows):
        lines += [f"## {target}\n", "| model | in place | temporaries | decode bytes | exchanges | sampler |"]
        lines += ["|---|---|---|---|---|---|", *(_line(row) for row in rows if row.target == target), ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.error is not None:
        return f"| {row.model} | does not compile: {row.error.replace('|', '/')} | | | | |"
    ratio = "" if row.decode_ratio is None else f"{row.decode_ratio:.2f}"
    exchanges = ", ".join(f"{number} {opcode}" for opcode, number in sorted(row.exchanges.items())) or "none"
    in_place = "yes" if row.in_place else "**no**"
    return f"| {row.model} | {in_place} | {row.temporaries:.1f} | {ratio} | {exchanges} | {row.sampler_exchange:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="such as v6e-8; none rewrites the page from the rows that are there")
    parser.add_argument("--models", default=",".join(FAMILIES), help="names of configs, separated by commas")
    args = parser.parse_args()
    rows = [Row(**row) for row in json.loads(ROWS.read_text())] if ROWS.exists() else []
    for target in args.targets:
        for model in args.models.split(","):
            row = measure(model, target)
            print(_line(row), target, flush=True)
            rows = [each for each in rows if (each.model, each.target) != (model, target)] + [row]
            rows.sort(key=lambda each: (each.target, each.model))
            ROWS.write_text(json.dumps([dataclasses.asdict(each) for each in rows], indent=1) + "\n")
            PAGE.write_text(page(rows))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
