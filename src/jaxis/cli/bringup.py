"""The commands that bring a model up, beside `jaxis convert`: analyze, new-model, verify, report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxis.cli.command import OTHER_ARGUMENTS, Command
from jaxis.cli.console import EXIT_ERROR, note, print_json, report_errors, write_files
from jaxis.cli.options import Debug, JsonAnswer, ReportFolder, Revision
from jaxis.host.json_object import json_object_text

if TYPE_CHECKING:
    from jaxis.bringup.verify.check_layers import LayersCheck
    from jaxis.bringup.verify.compare import LogitsComparison
    from jaxis.bringup.verify.verify import DecodeCheck, VerifyResult


def analyze(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder, GGUF file, config.json, or Hub id.", show_default=False),
    ],
    as_json: JsonAnswer = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name the keys that change nothing too.")] = False,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Print only the modules, in the order of their calls, with shapes and files."),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Ask about a memory such as 80GiB, not this machine's; it must then fit."),
    ] = None,
    kv_cache_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"], typer.Option(help="Type of the cache to give figures for.")
    ] = "bfloat16",
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Tell whether a model can run, what it is made of, and how large it is.

    Reads config.json and the headers of the weights, never the weights: seconds for any size.
    Exits with 0 if it can run (with --memory: and fits), 1 if not, and 3 if that could not be told.

    \b
    [bold]Examples[/bold]
      jaxis analyze Qwen/Qwen3-30B-A3B
      jaxis analyze ./model --memory 80GiB
      jaxis analyze Qwen/Qwen3-0.6B --tree
      jaxis analyze config.json --json | jq .findings
    """
    with report_errors(debug=debug, command="analyze", as_json=as_json):
        from rich.console import Console

        from jaxis.bringup.analyze.analysis import analyze
        from jaxis.bringup.analyze.text import analysis_text, tree_text

        analysis = analyze(
            model, memory=memory, kv_cache_dtype=kv_cache_dtype, revision=revision, in_order_of_calls=tree
        )
        if as_json:
            print(analysis.to_json())
        elif tree and analysis.modules is not None:
            print(tree_text(analysis.modules, Console(highlight=False)), end="")
        else:
            print(analysis_text(analysis, Console(highlight=False), verbose=verbose), end="")
        if not analysis.can_run or (memory is not None and not analysis.fits):
            raise typer.Exit(EXIT_ERROR)


def new_model(
    name: Annotated[str, typer.Argument(help="As its classes will begin, such as Falcon4.", show_default=False)],
    like: Annotated[
        str, typer.Option(metavar="FAMILY", help="Family to start from, such as qwen3.", show_default=False)
    ],
    as_json: JsonAnswer = False,
    debug: Debug = False,
) -> None:
    """Start a model family from an existing one.

    To be run in a checkout of jaxis.
    Writes the family's file and a row of its tests.
    It is the copied family under another name, and passes that family's tests: change from there what differs.

    \b
    [bold]Example[/bold]
      jaxis new-model Falcon4 --like qwen3
    """
    with report_errors(debug=debug, command="new-model", as_json=as_json):
        from jaxis.bringup import new_model as bringup

        made = bringup.new_model(name, like, Path())
        if as_json:
            files = [str(path) for path in made.files]
            print_json("new-model", "written", {**dataclasses.asdict(made), "files": files})
            return
        lines = [*(f"wrote {path}" for path in made.files), f"check it with: {made.check}"]
        note("\n".join([*lines, *(f"then: {step}" for step in made.next_steps)]))


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder or Hub id of a checkpoint, or a config.json alone.", show_default=False
    ),
]


class Dtype(StrEnum):
    """Data types in which jaxis computes; the reference computes in float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class VerifyPart(StrEnum):
    """A part of the verification."""

    layers = "layers"
    images = "images"
    logits = "logits"
    paths = "paths"
    decode = "decode"


def verify(
    context: typer.Context,
    model: Checkpoint,
    dtype: Annotated[Dtype, typer.Option(help="Data type that jaxis computes in; the reference is in float32.")] = (
        Dtype.float32
    ),
    prompt_lens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Lengths of the prompts (default: 1, 17, 500 and one longer than the window)."
        ),
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with stored reference logits, without torch.")
    ] = None,
    save_golden: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store the reference's logits, for --golden elsewhere.")
    ] = None,
    only: Annotated[
        list[VerifyPart] | None,
        typer.Option(help="Check this part only; may be given several times.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Compare with a server of the model instead: vLLM, llama-server, Ollama, ..."),
    ] = None,
    against_model: Annotated[
        str, typer.Option(metavar="NAME", help="The model's name at --against (default: the first listed there).")
    ] = "",
    against_key: Annotated[
        str, typer.Option(metavar="KEY", help="API key of --against.", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = "",
    as_json: JsonAnswer = False,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Compare a model with transformers: layers, logits, every path of the engine, generated tokens, images.

    Without weights, a tiny model of the same architecture is made with random weights and compared.
    Needs torch and transformers: pip install 'jaxis\\[verify]'.
    With --against, compares log-probabilities with a server's, and says if template, tokenizer or weights differ.
    Exits with 1 if anything differs, and names the first module that does; with 3 if it could not run.

    \b
    [bold]Examples[/bold]
      jaxis verify ./Qwen3-0.6B
      jaxis verify ./config.json --dtype bfloat16
      jaxis verify ./config.json --only layers
      jaxis verify ./Qwen3-0.6B --save-golden qwen3.safetensors
      jaxis verify ./Qwen3-0.6B --golden qwen3.safetensors
      jaxis verify ./Qwen3-0.6B --against http://127.0.0.1:8000
    """
    lengths = _parse_lengths(prompt_lens, context.args)
    if against is not None:
        if golden is not None or save_golden is not None or only or lengths or revision is not None:
            raise typer.BadParameter(
                "compares with a server: give it with --dtype, --json, --against-model and --against-key only",
                param_hint="--against",
            )
        _verify_against(model, against, against_model, against_key, dtype, as_json=as_json, debug=debug)
        return
    if golden is not None and (save_golden is not None or lengths):
        raise typer.BadParameter("brings its own prompts and logits: give it alone", param_hint="--golden")
    with report_errors(debug=debug, command="verify", as_json=as_json):
        from rich.console import Console

        from jaxis.bringup.verify.verify import verify as run

        with Console(stderr=True).status("Starting") as status:
            result = run(
                model,
                dtype=dtype.value,
                prompt_lengths=lengths,
                golden=golden,
                save_golden=save_golden,
                revision=revision,
                only=[part.value for part in only or ()],
                on_stage=lambda stage: status.update(stage.capitalize()),
            )
        if as_json:
            print(json_object_text(result.to_dict()))
        else:
            _print(result)
        if save_golden is not None:
            note(f"{save_golden}: {save_golden.stat().st_size / 1e6:.1f} MB of reference logits")
    if not result.passed:
        raise typer.Exit(EXIT_ERROR)


def _verify_against(
    model: str, url: str, server_model: str, api_key: str, dtype: Dtype, *, as_json: bool, debug: bool
) -> None:
    with report_errors(debug=debug, command="verify-against", as_json=as_json):
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        from jaxis.bringup.verify.against import verify_against

        with Console(stderr=True).status("Starting") as status:
            result = verify_against(
                model,
                url,
                server_model=server_model,
                api_key=api_key,
                dtype=dtype.value,
                on_stage=lambda stage: status.update(stage.capitalize()),
            )
        if as_json:
            print(json_object_text(result.to_dict()))
        else:
            console = Console(highlight=False)
            what = f"{result.dtype}, against {result.server_model} of {result.url}"
            console.print(f"[bold]{escape(result.model)}[/bold]: {escape(what)}", soft_wrap=True)
            table = Table("log-probabilities", "mean difference", "max", "top 1", "", box=SIMPLE)
            for check in result.checks:
                agreement = "" if check.argmax_agreement is None else f"{check.argmax_agreement:.0%}"
                figures = f"{check.mean_difference:.1e}", f"{check.max_difference:.1e}", agreement
                table.add_row(f"{check.probe}, {check.num_tokens} tokens", *figures, _mark(check.passed))
            console.print(table)
            for finding in result.findings:
                console.print(escape(f"{finding.code}: {finding.message}"), soft_wrap=True)
            print("verified" if result.passed else "differs")
    if not result.passed:
        raise typer.Exit(EXIT_ERROR)


def _parse_lengths(text: str | None, others: Sequence[str]) -> list[int]:
    if text is None:
        if others:
            raise typer.BadParameter(f"unexpected: {' '.join(others)}", param_hint="MODEL")
        return []
    text = ",".join([text, *others])
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of lengths such as 1,17,500", param_hint="--prompt-lens")
    return [int(part) for part in parts]


def _print(result: VerifyResult) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    what = f"{result.architecture}, {result.weights}, {result.dtype}, against {result.reference}"
    console.print(f"[bold]{escape(result.model)}[/bold]: {escape(what)}", soft_wrap=True)
    table = Table("check", "max error", "mean KL", "max KL", "top 1", "top 10", "", box=SIMPLE)
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    if result.layers is not None and result.layers.divergence is not None:
        console.print("[bold red]at fault:[/bold red]", escape(str(result.layers.divergence)), soft_wrap=True)
        code = (result.layers.divergence.our_code, result.layers.divergence.reference_code)
        for whose, places in zip(("jaxis", "the reference"), code, strict=True):
            console.print(escape(f"code of {whose}: {', '.join(places) or 'not found'}"), soft_wrap=True)
    for line in result.notes():
        console.print(escape(line), soft_wrap=True)
    verdict = "[bold green]verified[/bold green]" if result.passed else "[bold red]differs[/bold red]"
    console.print(f"{verdict} in {result.seconds:.0f} s")


def _rows(result: VerifyResult) -> Iterator[tuple[str, ...]]:
    if result.layers is not None:
        yield _layers_row(result.layers)
    if (images := result.images) is not None:
        name = f"an image, {images.num_embeddings} embeddings"
        yield name, f"{images.embeddings_error:.1e}", "", "", "", "", _mark(images.passed)
        tokens = images.comparison.num_tokens
        yield f"logits with it, {tokens} tokens", *_figures(images.comparison), _mark(images.passed)
    for check in result.logits:
        yield f"logits, {check.prompt_length} tokens", *_figures(check.comparison), _mark(check.passed)
    for path in result.paths:
        yield f"{path.path}, {path.comparison.num_tokens} tokens", *_figures(path.comparison), _mark(path.passed)
    if result.decode is not None:
        yield _decode_row(result.decode)


def _layers_row(layers: LayersCheck) -> tuple[str, ...]:
    return f"layers, {layers.num_compared} modules", f"{layers.worst_error:.1e}", "", "", "", "", _mark(layers.passed)


def _decode_row(decode: DecodeCheck) -> tuple[str, ...]:
    if decode.skipped:
        return f"greedy: {decode.skipped}", "", "", "", "", "", "skipped"
    apart = "" if decode.margin is None else f"{decode.margin:.1e} apart"
    return f"greedy, {decode.num_equal} of {decode.num_tokens} tokens", apart, "", "", "", "", _mark(decode.passed)


def _figures(comparison: LogitsComparison) -> tuple[str, ...]:
    errors = (comparison.relative_error, comparison.mean_kl_nats, comparison.max_kl_nats)
    shares = (comparison.argmax_agreement, comparison.top_k_overlap)
    return *(f"{error:.1e}" for error in errors), *(f"{share:.1%}" for share in shares)


def _mark(passed: bool) -> str:
    return "[green]ok[/green]" if passed else "[bold red]FAIL[/bold red]"


def report(
    model: Checkpoint,
    output: ReportFolder = Path("report"),
    as_json: JsonAnswer = False,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Tick a model's bring-up checklist from evidence.

    Analyses, verifies in float32 and bfloat16, and converts to Orbax and back.
    Writes report.md and report.json.
    Needs torch and transformers: pip install 'jaxis\\[verify]'.
    Exits with 1 if an item is not ticked, and 3 if it could not run.

    \b
    [bold]Examples[/bold]
      jaxis report ./Qwen3-0.6B
      jaxis report config.json --output qwen3-report
    """
    with report_errors(debug=debug, command="report", as_json=as_json):
        from rich.console import Console

        from jaxis.bringup.checklist.checklist import make_report
        from jaxis.bringup.checklist.report_page import report_markdown

        with Console(stderr=True).status("Starting") as status:
            made = make_report(
                model, revision=revision, on_stage=lambda stage: status.update(stage[0].upper() + stage[1:])
            )
        files = {"report.json": made.to_json(), "report.md": report_markdown(made)}
        write_files(output, files)
        if as_json:
            print_json("report", "passed" if made.passed else "failed", json.loads(files["report.json"]))
        else:
            for item in made.items:
                print(f"[{'x' if item.passed else ' '}] {item.title}")
        note(f"wrote {', '.join(str(output / name) for name in files)}")
    if not made.passed:
        raise typer.Exit(EXIT_ERROR)


COMMANDS = (
    Command("analyze", analyze, "bringup"),
    Command("new-model", new_model, "bringup"),
    Command("verify", verify, "bringup", OTHER_ARGUMENTS),  # lengths of prompts, with spaces
    Command("report", report, "bringup"),
)
