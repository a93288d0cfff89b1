"""`jaxis plan`: fits a model on accelerators, and estimates the least cost of its steps there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import EXIT_ERROR, note, print_json, report_errors
from jaxis.cli.options import Debug, JsonAnswer, Revision
from jaxis.rooms import check_room

if TYPE_CHECKING:
    from jaxis.planning.plan import WantedPlaces

DEFAULT_TARGETS = ("v5e-8", "v6e-8", "v5p-8", "tpu7x-8", "a100x8", "h100x8", "h200x8", "b200x8")
"""One machine, or the smallest slice with a host's devices, of each accelerator that is sold today."""

_NO_MODEL = "name a MODEL, or the file of a training with --train"


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
            help="Accelerators, such as v6e-8, v5e:2x4 or h100x8; repeat it for several (default: one of each kind). "
            "this: this machine's CPU, measured once.",
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
    again: Annotated[bool, typer.Option("--again", help="With --on this: measure the machine anew.")] = False,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=0, metavar="NUMBER", help="With --on this: the best weights that are as fast for a request."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="With --on this: the best weights in as much memory, such as 2GiB."),
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile the steps for the target, and read their costs from that.")
    ] = False,
    as_json: JsonAnswer = False,
    revision: Revision = None,
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
      jaxis plan ./model --on v6e-8 --compile --json
      jaxis plan --train config.yaml --on h100x8
      jaxis plan Qwen/Qwen3-0.6B --on this --tokens-per-second 20
    """
    if train is not None or "this" in (on or ()):
        with report_errors(debug=debug, command="plan-train" if train is not None else "plan-this", as_json=as_json):
            if train is not None:
                fits = _plan_training(context, train, on, as_json=as_json)
            else:
                limits = (max_model_len, quantization, tokens_per_second, memory)
                fits = _plan_here(context, model, on or [], limits, again=again, revision=revision, as_json=as_json)
            if not fits:
                raise typer.Exit(EXIT_ERROR)
        return
    with report_errors(debug=debug, command="plan", as_json=as_json):
        from rich.console import Console

        from jaxis.bringup.analyze.source import open_source
        from jaxis.compilation.targets import parse_target
        from jaxis.errors import ConfigError
        from jaxis.planning.layout import WantedLayout
        from jaxis.planning.plan import Planner, Wanted
        from jaxis.planning.plan_summary import PlanReport
        from jaxis.planning.text import plan_text

        _check(model, on, compiles=compiles, is_here=again or tokens_per_second is not None or memory is not None)
        targets = [parse_target(name) for name in on or DEFAULT_TARGETS]
        source = open_source(model or "", revision=revision)
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
        print(report.to_json() if as_json else plan_text(report, Console(highlight=False)), end="\n" if as_json else "")
        if on is not None and not all(each.chosen.fits for each in report.plans):
            raise typer.Exit(EXIT_ERROR)


def _check(model: str | None, on: list[str] | None, *, compiles: bool, is_here: bool) -> None:
    """Raises ConfigError for options that do not go together; `is_here` is True with those of --on this."""
    from jaxis.errors import ConfigError

    if is_here:
        raise ConfigError("--again, --tokens-per-second and --memory are for this machine: give --on this")
    if model is None:
        raise ConfigError(_NO_MODEL)
    if compiles and (on is None or len(on) != 1):
        raise ConfigError("--compile is for one target: give one with --on")


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


def _plan_here(
    context: typer.Context,
    model: str | None,
    on: list[str],
    limits: tuple[int | None, str | None, float | None, str | None],
    *,
    again: bool,
    revision: str | None,
    as_json: bool,
) -> bool:
    """Prints what a model needs of this machine; whether some weights fit and are as was asked for.

    `limits` are the values of --max-model-len, --quantization, --tokens-per-second and --memory.
    """
    from jaxis.bringup.analyze.source import open_source
    from jaxis.errors import ConfigError
    from jaxis.host.byte_size import parse_bytes
    from jaxis.host.machine import free_host_bytes
    from jaxis.planning.local_plan import LocalWanted, local_plan_text, plan_here
    from jaxis.planning.machine import keep, kept_machine
    from jaxis.planning.measure import measure

    allowed = ("model", "on", "again", "revision", "max_model_len", "quantization", "tokens_per_second", "memory")
    _refuse_others(context, allowed, "--on this")
    if model is None:
        raise ConfigError(_NO_MODEL)
    if len(on) > 1:
        raise ConfigError("--on this is for this machine alone: leave the other targets out")
    context_len, quantization, rate, memory = limits
    memory_bytes = None if memory is None else parse_bytes(memory, "--memory")
    source = open_source(model, revision=revision)
    machine = None if again else kept_machine()
    if machine is None:
        machine = measure(note)
        keep(machine)
    wanted = LocalWanted(context_len, quantization, rate or 0.0, memory_bytes)
    plan = plan_here(source, machine, free_host_bytes(), wanted)
    if as_json:
        print_json("plan-this", "does_not_fit" if plan.chosen is None else "fits", dataclasses.asdict(plan))
    else:
        print(local_plan_text(plan))
    return plan.chosen is not None


def _refuse_others(context: typer.Context, allowed: tuple[str, ...], reason: str) -> None:
    """Raises ConfigError if the command line has an option that is not among those allowed for this kind of plan."""
    from jaxis.errors import ConfigError

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in (*allowed, "as_json", "debug"):
            raise ConfigError(f"{parameter.opts[0]} cannot be honoured with {reason}: leave it out")


def _plan_training(context: typer.Context, config: Path, on: list[str] | None, *, as_json: bool) -> bool:
    """Prints what a training needs of each device; whether it fits on all of them."""
    check_room("training", "--train")
    from jaxis.compilation.targets import parse_target
    from jaxis.config.yaml_file import read_yaml_mapping
    from jaxis.training.config import TrainConfig
    from jaxis.training.memory_plan import plan_training

    _refuse_others(context, ("train", "on"), "--train, whose file says it")
    targets = [parse_target(name) for name in on or ()]
    plan = plan_training(TrainConfig.of(read_yaml_mapping(config)), targets)
    print(plan.to_json() if as_json else plan.to_text())
    return plan.fits


COMMANDS = (Command("plan", plan, "planning"),)
