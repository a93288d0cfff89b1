"""Writes docs/compiled-programs.json.

  JAX_PLATFORMS=cpu python -m tools.compiled_programs v6e-8 v6e-1
  JAX_PLATFORMS=cpu python -m tools.compiled_programs h100x1 --models qwen3-0.6b,mixtral-8x7b
  JAX_PLATFORMS=cpu python -m tools.compiled_programs --widths bfloat16,int8,int4

Run it from the repository's root where the target's compiler is installed (`make test-compile` makes such
environments); one kind of GPU a process. Several processes may run at a time: each adds its rows to those that are
there, one after the other, so a run that was stopped goes on where it was (`--again` compiles all anew).
"""

from __future__ import annotations

import argparse

from tests.support.compiled_steps import FAMILIES
from tests.support.places import REPOSITORY
from tools.compiled_programs.measure import measure
from tools.compiled_programs.rows import BFLOAT16, merge_rows, read_rows
from tools.compiled_programs.shapes import SHAPES

ROWS = REPOSITORY / "docs" / "compiled-programs.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        "tools.compiled_programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets",
        nargs="*",
        help="such as v6e-8; none: with --widths the slices that hold the shapes, else no compiling",
    )
    parser.add_argument("--models", help="names of configs, separated by commas (the families, or the shapes)")
    parser.add_argument("--widths", help=f"of the weights, separated by commas: {BFLOAT16}, int8, int4, stored")
    parser.add_argument("--tokens", default="1,64,512", help="of a step, separated by commas")
    parser.add_argument("--again", action="store_true", help="compile also what the JSON file has already")
    args = parser.parse_args()
    widths = (args.widths or BFLOAT16).split(",")
    tokens = [int(each) for each in args.tokens.split(",")]
    if args.targets:
        models = args.models.split(",") if args.models else FAMILIES
        wanted = [(model, target, width) for target in args.targets for model in models for width in widths]
    elif args.widths:
        models = args.models.split(",") if args.models else list(SHAPES)
        wanted = [
            (model, target, width) for model in models for width in widths for target in SHAPES[model].get(width, ())
        ]
    else:
        wanted = []
    known = {} if args.again else {row.key: row for row in read_rows(ROWS)}
    for model, target, width in wanted:
        row = known.get((target, model, width))
        if row is None or row.error is not None or any(str(each) not in row.steps for each in tokens):
            print(row := measure(model, target, width, tokens), flush=True)
            merge_rows(ROWS, [row])


if __name__ == "__main__":
    main()
