"""What formats of weights cost on real text: jaxis's and llama.cpp's, made from the same float32 model.

    python benchmarks/quantization_quality.py --model ./Qwen3-0.6B
    python benchmarks/quantization_quality.py --model ./Qwen3-0.6B --jaxis int8,int4,rules.yaml --llama-cpp q8_0,q4_0
    python benchmarks/quantization_quality.py --model ./Qwen3-0.6B --file ./Qwen3-0.6B-int4 --file published.gguf
    python benchmarks/quantization_quality.py --model ./Qwen3-0.6B --importance imatrix.dat

Prints a Markdown table, largest weights first. KL is the divergence, in nats, of the next-token distribution from that
of the model itself in jaxis, and top-1 the share of tokens whose most likely successor is the same; see
`jaxis.calibration.evaluate`. llama.cpp's files are made by its own quantizer from a float32 GGUF file of the model,
those named -imatrix with the importance matrix that `--importance` gives.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxis.calibration.evaluate import Evaluation, SourcePredictions
from jaxis.host.cores import usable_cores

TEXTS = tuple(sorted((Path(__file__).parent / "texts").glob("*.txt")))
JAXIS = "none,int8,int4"
LLAMA_CPP = "q8_0,q6_k,q5_k_m,q4_k_m,q4_1,iq4_nl,q4_0"


@dataclass(frozen=True)
class Row:
    """One format of the weights in one engine.

    Attributes:
      name: For the table.
      engine: "jaxis" or "llama.cpp".
      evaluation: What was measured.
    """

    name: str
    engine: str
    evaluation: Evaluation


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="jaxis-quality-") as scratch:
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        with SourcePredictions(arguments.model, arguments.text) as source:
            measured = jaxis_rows(source, arguments)
            if arguments.llama_cpp or any(is_gguf(file) for file in arguments.file):
                measured = itertools.chain(measured, llama_cpp_rows(source, arguments, work))
            rows = []
            for row in measured:
                print(f"{row.engine} {row.name}: KL {row.evaluation.kl_mean:.5f}", file=sys.stderr, flush=True)
                rows.append(row)
        rows.sort(key=lambda row: -row.evaluation.quantized_bytes)
        print(table(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, not quantized")
    parser.add_argument("--text", type=Path, action="append", help="default: the three files of benchmarks/texts")
    parser.add_argument("--jaxis", default=JAXIS, help="names or files with rules (default: %(default)s)")
    parser.add_argument("--llama-cpp", default=LLAMA_CPP, help="types of GGUF files (default: %(default)s)")
    parser.add_argument("--file", type=Path, action="append", default=[], help="a quantized folder, or a GGUF file")
    parser.add_argument("--importance", type=Path, help="matrix of llama-imatrix, as a .dat file")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp leaves weights as the file has them")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of llama.cpp (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder that keeps GGUF files for the next run (default: temporary)")
    arguments = parser.parse_args()
    arguments.text = arguments.text or TEXTS
    arguments.jaxis = [name for name in arguments.jaxis.split(",") if name]
    arguments.llama_cpp = [name for name in arguments.llama_cpp.split(",") if name]
    return arguments


def jaxis_rows(source: SourcePredictions, arguments: argparse.Namespace) -> Iterator[Row]:
    for name in arguments.jaxis:
        yield Row(name, "jaxis", source.evaluate(arguments.model, quantization=name))
    for file in arguments.file:
        yield Row(file.name, "jaxis", source.evaluate(file))


def llama_cpp_rows(source: SourcePredictions, arguments: argparse.Namespace, work: Path) -> Iterator[Row]:
    # Imported here, because it is built from source, and jaxis's own rows need none of it.
    import gguf

    from peers.llama_cpp_peer import LlamaCppLogits

    options = {"threads": arguments.threads, "repack": not arguments.no_repack}
    longest = max(map(len, source.windows))
    for name, file in [*gguf_files(arguments, work), *((file.name, file) for file in arguments.file if is_gguf(file))]:
        weight_bytes = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
        with contextlib.closing(LlamaCppLogits(file, options, longest)) as compute_logits:
            yield Row(name, "llama.cpp", source.compare(compute_logits, weight_bytes, name))


def gguf_files(arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, Path]]:
    """Name and GGUF file of each of llama.cpp's formats, made unless it is there."""
    from gguf_file import quantize_gguf
    from jaxis.bringup.convert.to_gguf import convert_to_gguf

    plain = work / f"{arguments.model.name}-f32.gguf"
    if arguments.llama_cpp and not plain.exists():
        convert_to_gguf(arguments.model, plain, "f32")
    for name in arguments.llama_cpp:
        for matrix, suffix in ((None, ""), (arguments.importance, "-imatrix")):
            if matrix is None and suffix:
                continue
            file = work / f"{arguments.model.name}-{name}{suffix}.gguf"
            if not file.exists():
                quantize_gguf(plain, file, name, matrix)
            yield name + suffix, file


def table(rows: list[Row]) -> str:
    columns = ["format", "engine", "weights", "perplexity", "KL", "KL, p99", "top-1"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        result = row.evaluation
        cells = [row.name, row.engine, f"{result.quantized_bytes / 1e6:.0f} MB", f"{result.perplexity:.2f}"]
        cells += [f"{result.kl_mean:.4f}", f"{result.kl_p99:.3f}", f"{result.top1:.1%}"]
        lines.append(cells)
    source = rows[0].evaluation
    head = f"{source.num_tokens} tokens; the model itself: {source.source_bytes / 1e6:.0f} MB, "
    head += f"perplexity {source.source_perplexity:.2f}\n\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_gguf(file: Path) -> bool:
    return file.suffix == ".gguf"


if __name__ == "__main__":
    main()
