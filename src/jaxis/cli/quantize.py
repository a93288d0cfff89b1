"""`jaxis quantize`: writes a checkpoint with low-precision weights."""

from __future__ import annotations

import dataclasses
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import note, print_json, report_errors
from jaxis.cli.options import AdditionalConfig, Debug, JsonAnswer, Revision, parse_additional_config
from jaxis.rooms import check_options

if TYPE_CHECKING:
    from jaxis.calibration.calibrate import CalibratedWeights
    from jaxis.calibration.evaluate import Evaluation
    from jaxis.host.progress import ProgressDisplay
    from jaxis.quantization.rules import RuleQuantizationConfig


@dataclasses.dataclass(frozen=True)
class QuantizedFiles:
    """A folder that was written, and the bytes of the source's and its own weights."""

    destination: str
    source_bytes: int
    quantized_bytes: int


def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Folder or Hub id of the unquantized checkpoint.", show_default=False),
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DESTINATION]",
            help="Folder to make; with --evaluate, it may be left out, or be a quantized folder or GGUF file.",
            show_default=False,
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="int8 (the default), int4, or a YAML or JSON file with rules."),
    ] = None,
    additional_config: AdditionalConfig = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            metavar="BITS", help="Choose the types of modules for this many bits a weight on average: 4.5 to 8.25."
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", help="Choose the types of modules for the smallest size with at most this mean KL."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Round for the least error in what the layers compute on a .txt or .jsonl file. Takes minutes.",
            show_default=False,
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens of the --calibrate text to use; time grows with them.", min=1)
    ] = 16384,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TEXT",
            help="Compare with the source on a .txt file, or on a .jsonl file with text or messages. May be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonAnswer = False,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint with low-precision weights, which loads as it is.

    Tokenizer, chat templates and model card are copied.
    The folder appears when it is complete.
    --calibrate makes 4 bits a weight several times closer to the source.
    --evaluate prints size, perplexity, KL and top-1 agreement of the result beside the source's.
    Without DESTINATION nothing is written; one that exists is compared as it is.

    \b
    [bold]Examples[/bold]
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-int8
      jaxis quantize Qwen/Qwen3-0.6B ./Qwen3-0.6B-int4 --quantization int4
      jaxis chat ./Qwen3-0.6B-int4
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --quantization int4 --calibrate text.jsonl
      jaxis quantize ./Qwen3-0.6B --quantization int4 --evaluate text.txt
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --evaluate text.txt
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-small --target-bits 5 --evaluate text.txt
    """
    additional = None if additional_config is None else parse_additional_config(additional_config)
    texts = evaluate or []
    _check_usage(destination, texts, quantization, additional, target_bits, max_kl, calibrate)
    with report_errors(debug=debug, command="quantize", as_json=as_json), ExitStack() as stack:
        wanted = {"--evaluate": texts, "--calibrate": calibrate, "--target-bits": target_bits, "--max-kl": max_kl}
        check_options("calibration", wanted)
        from jaxis.host.progress import ProgressDisplay
        from jaxis.loading.checkpoint_files import check_destination
        from jaxis.loading.hub import resolve_model
        from jaxis.quantization.checkpoint import quantize_checkpoint
        from jaxis.quantization.rules import RuleQuantizationConfig

        display = ProgressDisplay()
        path = resolve_model(source, revision=revision)
        says_nothing = all(value is None for value in (quantization, additional, target_bits, max_kl, calibrate))
        compares = destination is not None and destination.exists() and bool(texts) and says_nothing
        if destination is not None and not compares:
            check_destination(destination, "folder")
        predictions = None
        if texts:
            from jaxis.calibration.evaluate import SourcePredictions

            with display.counting(f"Running {source}") as on_progress:
                predictions = stack.enter_context(SourcePredictions(path, texts, on_progress=on_progress))
        if compares:
            rules = None
        elif target_bits is not None or max_kl is not None:
            from jaxis.calibration.widths import choose_rules

            with display.counting(f"Measuring {source}") as on_progress:
                chosen = choose_rules(
                    path,
                    texts if calibrate is None else [calibrate],
                    predictions,
                    target_bits=target_bits,
                    max_kl=max_kl,
                    on_progress=on_progress,
                )
            rules = RuleQuantizationConfig(chosen)
        else:
            rules = _requested_rules(quantization, additional)
        written = evaluation = None
        if rules is not None and destination is not None:
            weights = None
            if calibrate is not None:
                weights = _calibrated_weights(path, calibrate, rules, calibration_tokens, display)
            with display.working(f"Quantizing {source}") as on_progress:
                nbytes = quantize_checkpoint(path, destination, rules, calibrated=weights, on_progress=on_progress)
            written = QuantizedFiles(str(destination), sum(file.stat().st_size for file in _weight_files(path)), nbytes)
            sizes = f"{written.source_bytes / 1e6:.1f} MB of files -> {nbytes / 1e6:.1f} MB"
            note(f"{destination}: {sizes}\nto try it: jaxis chat {shlex.quote(str(destination))}")
        if predictions is not None:
            with display.counting("Evaluating") as on_progress:
                if destination is not None:
                    evaluation = predictions.evaluate(destination, on_progress=on_progress)
                else:
                    assert rules is not None
                    evaluation = predictions.evaluate(path, quantization=rules.rules, on_progress=on_progress)
        _print(written, evaluation, as_json=as_json)


def _print(written: QuantizedFiles | None, evaluation: Evaluation | None, *, as_json: bool) -> None:
    if as_json:
        parts = {"written": written, "evaluation": evaluation}
        facts = {name: part and dataclasses.asdict(part) for name, part in parts.items()}
        print_json("quantize", "written" if written else "evaluated", facts)
    elif evaluation is not None:
        print(format_evaluation(evaluation))


def _weight_files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _calibrated_weights(
    source: Path, text: Path, rules: RuleQuantizationConfig, num_tokens: int, display: ProgressDisplay
) -> CalibratedWeights:
    from jaxis.calibration.calibrate import calibrate
    from jaxis.host.machine import peak_memory_bytes

    start = time.perf_counter()
    with display.counting(f"Calibrating {source}, layer") as on_progress:
        weights = calibrate(source, text, rules, num_tokens=num_tokens, on_progress=on_progress)
    seconds = time.perf_counter() - start
    count, peak_bytes = len(set(map(id, weights.values()))), peak_memory_bytes()
    note(f"{count} weights calibrated in {seconds:.0f} s, with {peak_bytes / 1e9:.1f} GB of memory at most")
    return weights


def _check_usage(
    destination: Path | None,
    texts: list[Path],
    quantization: str | None,
    additional: dict[str, Any] | None,
    target_bits: float | None,
    max_kl: float | None,
    calibrate: Path | None,
) -> None:
    """Raises BadParameter for options that do not go together."""
    if destination is None and not texts:
        raise typer.BadParameter("is missing: only with --evaluate may it be left out", param_hint="DESTINATION")
    if destination is None and calibrate is not None:
        raise typer.BadParameter("writes a folder: give DESTINATION", param_hint="--calibrate")
    for option, value in (("--target-bits", target_bits), ("--max-kl", max_kl)):
        if value is None:
            continue
        if value <= 0:
            raise typer.BadParameter(f"{value} is not positive", param_hint=option)
        if not texts and (calibrate is None or option == "--max-kl"):
            raise typer.BadParameter("needs text to measure on: give --evaluate", param_hint=option)
        if quantization is not None or additional is not None:
            raise typer.BadParameter(
                "chooses the types of modules: leave out --quantization and --additional-config", param_hint=option
            )
    if target_bits is not None and max_kl is not None:
        raise typer.BadParameter("and --target-bits were both given: leave one out", param_hint="--max-kl")


def _requested_rules(quantization: str | None, additional: dict[str, Any] | None) -> RuleQuantizationConfig:
    from jaxis.errors import ConfigError
    from jaxis.quantization.arguments import parse_quantization
    from jaxis.quantization.rules import RuleQuantizationConfig

    if quantization is None and additional is None:
        quantization = "int8"
    rules = parse_quantization(quantization, additional)
    if not isinstance(rules, RuleQuantizationConfig):
        raise ConfigError(f"jaxis quantize cannot write what --quantization {quantization} asks for: give rules")
    return rules


def format_evaluation(evaluation: Evaluation) -> str:
    share = evaluation.quantized_bytes / evaluation.source_bytes
    rows = [
        ("", "source", "quantized"),
        (
            "weights",
            f"{evaluation.source_bytes / 1e6:.1f} MB",
            f"{evaluation.quantized_bytes / 1e6:.1f} MB ({share:.0%})",
        ),
        ("perplexity", f"{evaluation.source_perplexity:.3f}", f"{evaluation.perplexity:.3f}"),
        ("KL, mean", "", f"{evaluation.kl_mean:.5f}"),
        ("KL, 99th percentile", "", f"{evaluation.kl_p99:.5f}"),
        ("same top-1", "", f"{evaluation.top1:.2%}"),
    ]
    lines = [f"{name:<20}{source:>14}{quantized:>22}".rstrip() for name, source, quantized in rows]
    return "\n".join([f"{evaluation.num_tokens} predicted tokens", *lines])


COMMANDS = (Command("quantize", quantize),)
