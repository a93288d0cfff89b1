"""What `jaxis plan --on this` says beside what `jaxis bench latency` measures: a table of ratios and a plot.

    jaxis plan MODEL --on this                         # measures the machine, once
    python benchmarks/planned.py --out results         # random weights of three shapes by three widths, 15 minutes
    python benchmarks/planned.py --out results --shapes qwen3-0.6b --widths int4   # these again
    python benchmarks/planned.py --out results --plot-only

Each engine runs in a process of its own, after one that compiled what its start needs. A line of
`planned.jsonl` has a shape, a width and the report of `jaxis bench latency --json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from random_checkpoint import SHAPES, write_random_checkpoint

WIDTHS = ("none", "int8", "int4")
# --input-len, --batch-size, --output-len of the runs of an engine.
LOADS = (("128", "1,4,16", "16"), ("1024", "1", "2"))
# Programs are those of a size of caches, so all engines have the same.
SIZES = ("--max-num-seqs", "16", "--max-model-len", "2048")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3.5-0.8b,qwen3-moe-1.5b")
    parser.add_argument("--widths", default=",".join(WIDTHS))
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "planned.jsonl"
    runs = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
    if not options.plot_only:
        shapes, widths = options.shapes.split(","), options.widths.split(",")
        runs = [run for run in runs if run["shape"] not in shapes or run["width"] not in widths]
        for run in _runs(shapes, widths):
            runs.append(run)
            results.write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    pairs = list(_pairs(runs))
    for engine, figure, planned, measured in pairs:
        print(f"{engine:24} {figure:28} {planned:10.4g} {measured:10.4g} {planned / measured:6.2f}")
    near = sum(abs(planned / measured - 1) <= 0.15 for _, _, planned, measured in pairs)
    print(f"{near} of {len(pairs)} within 15%")
    _plot(pairs, options.out / "planned.png")


def _runs(shapes: list[str], widths: list[str]) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="jaxis_planned_") as temporary:
            model = Path(temporary, shape)
            write_random_checkpoint(model, SHAPES[shape])
            for width in widths:
                _bench(model, width, ("128,1024", "1", "1"))  # compiles
                for load in LOADS:
                    yield {"shape": shape, "width": width, "report": _bench(model, width, load)}


def _bench(model: Path, width: str, load: tuple[str, str, str]) -> dict[str, Any]:
    input_len, batch_size, output_len = load
    report = model.parent / "report.json"
    command = [str(Path(sys.executable).with_name("jaxis")), "bench", "latency", str(model), "--json", str(report)]
    command += ["--input-len", input_len, "--batch-size", batch_size, "--output-len", output_len]
    command += ["--repeats", "1", *SIZES]
    if width != "none":
        command += ["--quantization", width]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text(encoding="utf-8"))


def _pairs(runs: list[dict[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Yields an engine, a figure's name, and the planned and the measured figure."""
    for run in runs:
        report, engine = run["report"], f"{run['shape']} {run['width']}"
        if (planned := report.get("planned")) is None:
            raise SystemExit("nothing is planned for this machine: run jaxis plan MODEL --on this first")
        start = report["start"]
        yield engine, "start, s", planned["start_seconds"], start["seconds_to_first_token"]
        yield engine, "memory, GB", planned["start_bytes"] / 1e9, start["peak_memory_bytes"] / 1e9
        for load, result in zip(planned["loads"], report["results"], strict=True):
            size, length = result["batch_size"], result["input_len"]
            if size == 1:
                yield engine, f"first token of {length}, s", load["prefill_seconds"], result["prefill_seconds"]
            if length < 1024:  # without drafts, which nothing is planned for
                measured = size * result["decode_steps_per_second"]
                yield engine, f"{size} requests, tokens/s", load["decode_tokens_per_second"], measured


def _plot(pairs: list[tuple[str, str, float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(figure for _, figure, *_ in pairs):
        points = [(measured, planned) for _, figure, planned, measured in pairs if figure == name]
        axes.scatter(*zip(*points, strict=True), label=name, s=24)
    ends = [min(min(p[2:]) for p in pairs), max(max(p[2:]) for p in pairs)]
    axes.plot(ends, ends, color="gray", linewidth=1)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="gray", alpha=0.2, label="15%")
    axes.set(title="Planned beside measured", xlabel="measured", ylabel="planned", xscale="log", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
