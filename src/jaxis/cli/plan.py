"""`jaxis plan`: fits a model on accelerators, and estimates the least cost of its steps there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import EXIT_ERROR, note, report_errors
from jaxis.cli.options import Debug, JsonAnswer
from jaxis.rooms import check_room

if TYPE_CHECKING:
    from jaxis.planning.plan import WantedPlaces

DEFAULT_TARGETS = ("v5e-8", "v6e-8", "v5p-8", "tpu7x-8", "a100x8", "h100x8", "h200x8", "b200x8")
"""One machine, or the smallest slice with a host's devices, of each accelerator that is sold today."""


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, config.json, or Hub id.", show_default=False),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan a training instead: the YAML file of jaxis train.", show_default=False),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="Accelerators, such as v6e-8, v5e:2x4 or h100x8; repeat it for several (default: one of each kind).",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Tokens that each request grows to (default: 4096 or the model's)."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Devices that share each layer (default: the plan's choice)."),
    ] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", help="Groups of such devices that share experts (default: the plan's choice)."
        ),
    ] = None,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel", help="Experts lie whole on all these devices; always of several groups."
        ),
    ] = False,
    decode_context_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", help="Devices that share the tokens of a cache of latents: 1, or all of a group."
        ),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Stages that share the layers, each with such devices of its own."),
    ] = None,
    quantization: Annotated[
        Literal["none", "int8", "int4", "dequantize"] | None,
        typer.Option(help="Weights as for jaxis serve; none: as stored (default: the widest that fit)."),
    ] = None,
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"] | None,
        typer.Option(help="Type of the cache; auto: the model's (default: the wider that fits)."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of activations and of weights in floats (default: the checkpoint's)."),
    ] = None,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="With room for adapters of requests.")] = False,
    max_loras: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Adapters in a step.")] = 1,
    max_lora_rank: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Largest rank of an adapter.")] = 16,
    lora_target_modules: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Layers with room for adapters, with commas (default: all-linear).",
            show_default=False,
        ),
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile the steps for the target, and read their costs from that.")
    ] = False,
    as_json: JsonAnswer = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page too.", show_default=False)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Tell whether and how a model fits on accelerators, and how fast it can be there at most.

    Reads config.json and the headers of the weights, never the weights, and needs no accelerator.
    Times are lower bounds: bytes, operations and traffic of a step, divided by the data sheet's rates.
    The exit code is 0 if it fits on every target given with --on, 1 if not, and 3 if that could not be told.

    \b
    [bold]Examples[/bold]
      jaxis plan Qwen/Qwen3-8B
      jaxis plan Qwen/Qwen3-8B --on v6e-1 --max-model-len 8192
      jaxis plan config.json --on h100x8 --on v5e-16 --json
      jaxis plan deepseek-ai/DeepSeek-V3 --on v5e-64 --data-parallel-size 8
      jaxis plan ./model --on v6e-8 --compile --html plan.html
      jaxis plan --train config.yaml --on h100x8
    """
    if train is not None:
        with report_errors(debug=debug, command="plan-train", as_json=as_json):
            if not _plan_training(context, train, on, as_json=as_json):
                raise typer.Exit(EXIT_ERROR)
        return
    with report_errors(debug=debug, command="plan", as_json=as_json):
        from rich.console import Console

        from jaxis.bringup.analyze.source import open_source
        from jaxis.compilation.targets import parse_target
        from jaxis.errors import ConfigError, JaxisError
        from jaxis.planning.layout import WantedLayout
        from jaxis.planning.plan import Planner, Wanted
        from jaxis.planning.plan_summary import PlanReport
        from jaxis.planning.text import plan_html, plan_text

        if model is None:
            raise ConfigError("name a MODEL, or the file of a training with --train")
        if compiles and (on is None or len(on) != 1):
            raise ConfigError("--compile is for one target: give one with --on")
        targets = [parse_target(name) for name in on or DEFAULT_TARGETS]
        source = open_source(model, revision=revision)
        layout = WantedLayout(
            tensor_parallel_size,
            data_parallel_size,
            enable_expert_parallel,
            decode_context_parallel_size,
            pipeline_parallel_size,
        )
        places = _places(max_loras, max_lora_rank, lora_target_modules) if enable_lora else None
        if places is None and lora_target_modules is not None:
            raise ConfigError("--lora-target-modules needs --enable-lora")
        planner = Planner(source, Wanted(max_model_len, quantization, kv_cache_dtype, dtype, layout, places))
        plans = [planner.plan(target) for target in targets]
        if compiles:
            from jaxis.planning.compiled import with_compiled_steps

            with Console(stderr=True).status("Compiling") as status:
                plans = [with_compiled_steps(plans[0], planner, on_stage=status.update)]
        report = PlanReport(source.name, tuple(source.config.get("architectures") or ()), tuple(plans))
        if html is not None:
            try:
                html.write_text(plan_html(report), encoding="utf-8")
            except OSError as error:
                raise JaxisError(f"{html} cannot be written: {error.strerror}") from error
            note(f"wrote {html}")
        print(report.to_json() if as_json else plan_text(report, Console(highlight=False)), end="\n" if as_json else "")
        if on is not None and not all(each.chosen.fits for each in report.plans):
            raise typer.Exit(EXIT_ERROR)


def _places(max_loras: int, max_lora_rank: int, targets: str | None) -> WantedPlaces:
    """Room for adapters by request of the layers that `targets` names, with commas."""
    check_room("lora", "--enable-lora")
    from jaxis.lora.adaptable import ALL_LINEAR, place_bytes
    from jaxis.planning.plan import WantedPlaces

    names, text = (targets or ALL_LINEAR).split(","), f"--enable-lora --max-loras {max_loras}"
    text += f" --max-lora-rank {max_lora_rank}"
    return WantedPlaces(
        lambda model, dtype: max_loras * place_bytes(model, dtype, max_lora_rank, names),
        text if targets is None else f"{text} --lora-target-modules {targets}",
    )


def _plan_training(context: typer.Context, config: Path, on: list[str] | None, *, as_json: bool) -> bool:
    """Prints what a training needs of each device; whether it fits on all of them."""
    check_room("training", "--train")
    from jaxis.compilation.targets import parse_target
    from jaxis.config.yaml_file import read_yaml_mapping
    from jaxis.errors import ConfigError
    from jaxis.training.config import TrainConfig
    from jaxis.training.memory_plan import plan_training

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in ("train", "on", "as_json", "debug"):
            raise ConfigError(f"{parameter.opts[0]} cannot be honoured with --train, whose file says it: leave it out")
    targets = [parse_target(name) for name in on or ()]
    plan = plan_training(TrainConfig.of(read_yaml_mapping(config)), targets)
    print(plan.to_json() if as_json else plan.to_text())
    return plan.fits


COMMANDS = (Command("plan", plan, "planning"),)
