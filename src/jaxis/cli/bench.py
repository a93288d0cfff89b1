"""`jaxis bench`: the speed of a model on this machine, beside the machine's limits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from jaxis.cli.command import Command
from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.options import OUTPUT_PANEL, Debug, EngineOptions, OptionalModel, expand_options
from jaxis.errors import JaxisError, RequestError
from jaxis.rooms import has_room

if TYPE_CHECKING:
    import numpy as np

    from jaxis.bench.run import Load
    from jaxis.bench.session import Session

LOAD_PANEL = "Load"
HELP = "Measure speed and memory with random prompts; no tokenizer is needed."


def _load(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=LOAD_PANEL, **settings)


Seed = Annotated[int, _load("Of the random prompts.", metavar="NUMBER")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all figures as JSON too.", rich_help_panel=OUTPUT_PANEL),
]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP)


@app.command()
@expand_options
def latency(
    model: OptionalModel = None,
    input_len: Annotated[str, _load("Tokens of a prompt; 128,1024 runs both.", metavar="TOKENS")] = "128",
    output_len: Annotated[int, _load("Tokens to generate for each request.", min=1, metavar="TOKENS")] = 32,
    batch_size: Annotated[str, _load("Requests at once; 1,16 runs both.", metavar="NUMBER")] = "1",
    repeats: Annotated[int, _load("Measured runs of each load.", min=1, metavar="NUMBER")] = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 (frozen; only its type is used)
    debug: Debug = False,
) -> None:
    """Time requests that start together: first token, prefill, decode.

    Each input length is run with each batch size, once to compile what it needs, then to measure.
    Limits are what the machine's memory and arithmetic, measured too, allow; KV cache included.
    After jaxis plan --on this, what it plans stands beside.

    \b
    [bold]Examples[/bold]
      jaxis bench latency
      jaxis bench latency ./Qwen3-0.6B --input-len 128,1024 --batch-size 1,16
      jaxis bench latency ./Qwen3-0.6B --dtype bfloat16 --json latency.json
    """
    input_lens = _parse_numbers(input_len, "--input-len")
    batch_sizes = _parse_numbers(batch_size, "--batch-size")
    arguments = engine.llm_arguments()
    with report_errors(debug=debug):
        _check_writable(json_file)
        from jaxis.bench.latency import measure_latency
        from jaxis.bench.run import Load
        from jaxis.bench.session import limits_of_device, longest_sequence
        from jaxis.bench.text import format_latency

        loads = [Load(size, length, output_len) for length, size in itertools.product(input_lens, batch_sizes)]
        max_len = longest_sequence(loads, arguments)
        with _open(model, arguments, max(batch_sizes), max_len, input_lens[0], seed) as (session, rng):
            limits = limits_of_device()
            results = [measure_latency(session.engine, load, limits, repeats=repeats, rng=rng) for load in loads]
            report = session.report(limits, results)
        report["planned"] = _planned(model, arguments, loads)
        print(format_latency(report))
        _write_json(json_file, report)


@app.command()
@expand_options
def throughput(
    model: OptionalModel = None,
    num_prompts: Annotated[int, _load("Requests in all.", min=1, metavar="NUMBER")] = 64,
    input_len: Annotated[str, _load("Tokens of a prompt; 64,512 mixes both.", metavar="TOKENS")] = "128",
    output_len: Annotated[str, _load("Tokens to generate; 32,128 mixes both.", metavar="TOKENS")] = "32",
    seed: Seed = 0,
    json_file: JsonFile = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Time many requests that all wait: requests and tokens a second.

    The requests are run twice, first to compile what they need; --max-num-seqs of them run at once.

    \b
    [bold]Examples[/bold]
      jaxis bench throughput
      jaxis bench throughput ./Qwen3-0.6B --num-prompts 200 --input-len 64,512 --output-len 32,128
      jaxis bench throughput ./Qwen3-0.6B --max-num-seqs 16 --json throughput.json
    """
    input_lens = _parse_numbers(input_len, "--input-len")
    output_lens = _parse_numbers(output_len, "--output-len")
    arguments = engine.llm_arguments()
    with report_errors(debug=debug):
        _check_writable(json_file)
        from jaxis.bench.session import limits_of_device
        from jaxis.bench.text import format_throughput
        from jaxis.bench.throughput import measure_throughput, request_mix
        from jaxis.engine.engine_config import DEFAULT_MAX_NUM_SEQS

        budget = arguments.get("max_num_batched_tokens", DEFAULT_MAX_NUM_SEQS)
        max_num_seqs = min(num_prompts, budget, DEFAULT_MAX_NUM_SEQS)
        max_len = max(input_lens) + max(output_lens)
        with _open(model, arguments, max_num_seqs, max_len, input_lens[0], seed) as (session, rng):
            requests = request_mix(num_prompts, input_lens, output_lens, rng)
            result = measure_throughput(session.engine, requests, rng)
            report = session.report(limits_of_device(), [result])
        print(format_throughput(report))
        _write_json(json_file, report)


@contextmanager
def _open(
    model: str | None, arguments: dict[str, Any], max_num_seqs: int, max_model_len: int, input_len: int, seed: int
) -> Iterator[tuple[Session, np.random.Generator]]:
    """Opens a session, and the generator that draws its prompts."""
    with ExitStack() as stack:
        with exit_on_interrupt():
            import numpy as np

            from jaxis.bench.session import open_session
            from jaxis.host.progress import ProgressDisplay

            rng = np.random.default_rng(seed)
            session = stack.enter_context(
                open_session(
                    model,
                    arguments,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    input_len=input_len,
                    rng=rng,
                    progress=ProgressDisplay(),
                )
            )
        yield session, rng


def _planned(model: str | None, arguments: dict[str, Any], loads: Sequence[Load]) -> dict[str, Any] | None:
    if not has_room("planning"):
        return None
    from jaxis.planning.planned_bench import planned_bench

    try:
        return planned_bench(model, arguments, loads)
    except JaxisError as error:  # what was measured is worth more
        note(f"nothing is planned beside: {error}")
        return None


def _parse_numbers(text: str, option: str) -> list[int]:
    """Parses numbers such as "1,16"; raises typer.BadParameter for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{text!r} must be a number of at least 1, or several such as 1,16", param_hint=option)
    return [int(word) for word in words]


def _check_writable(file: Path | None) -> None:
    """Raises RequestError before measuring if the file cannot be written."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise RequestError(f"--json: {file} cannot be written: give a file in a folder that exists")


def _write_json(file: Path | None, report: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--json: {file} cannot be written: {error.strerror}") from None


COMMANDS = (Command("bench", app, "bench"),)
