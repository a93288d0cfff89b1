"""Plans for people, on a terminal, readable without colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxis.bench.text import format_number
from jaxis.host.byte_size import human_bytes
from jaxis.planning.exchanges import exchange_seconds, links
from jaxis.planning.plan import Plan, PlanOption, Step
from jaxis.planning.plan_summary import (
    PlanReport,
    command,
    compiled_line,
    data_sheet,
    decode_rates,
    remarks,
    source_line,
    step_name,
    verdict,
)

OPTION_COLUMNS = ("weights", "devices", "servers", "each holds", "longest", "requests", "1 request", "all")
EXCHANGE_COLUMNS = ("exchange", "of", "over", "times", "sends", "time", "links")
STEP_COLUMNS = ("step", "reads", "memory", "compute", "network", "tokens/s", "bound by")
SUMMARY_COLUMNS = ("target", "weights", "devices", "servers", "requests", "1 request", "all", "")


def plan_text(report: PlanReport, console: Console) -> str:
    """Formats one plan in full, or several as a table, for the console's width and colours."""
    with console.capture() as capture:
        console.print(Text(f"{report.model}  {', '.join(report.architectures)}", style="bold"))
        if len(report.plans) == 1:
            _print_plan(report, report.plans[0], console)
        else:
            context = report.plans[0].context_len
            _print_table(
                console,
                f"Requests of {context} tokens; 1 request, all: tokens/s at most",
                SUMMARY_COLUMNS,
                map(summary_row, report.plans),
            )
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def shown_options(plan: Plan) -> list[PlanOption]:
    """Returns options with the chosen type of cache, widest weights and most devices first; JSON has the others too.

    Among options that share as many devices in different ways, only the best is shown. Among those that do not fit, the
    first is, and of a width that never fits, only that on the most devices.
    """
    shown: dict[tuple[int, int], PlanOption] = {}
    for option in plan.options:
        if option.kv_cache_dtype == plan.chosen.kv_cache_dtype:
            shown.setdefault((option.width_rank, -option.layout.num_devices), option)
    fitting = {option.width_rank for option in shown.values() if option.fits}
    seen: set[int] = set()
    options = []
    for option in (shown[key] for key in sorted(shown)):
        if option.width_rank in fitting or option.width_rank not in seen or option is plan.chosen:
            options.append(option)
        seen.add(option.width_rank)
    return options


def compiled_lines(plan: Plan) -> list[tuple[str, str]]:
    """Pairs each compiled step with its line."""
    steps = plan.chosen.steps
    return [(step_name(step), compiled_line(step.compiled)) for step in steps if step.compiled is not None]


def option_row(option: PlanOption) -> list[str]:
    cells = [option.weights, str(option.layout), str(option.num_servers)]
    cells.append(human_bytes(option.device_weight_bytes + option.device_place_bytes))
    if not option.fits:
        return [*cells, str(option.max_context or "none"), "0", "", ""]
    return [*cells, str(option.max_context), str(option.max_requests), *_rates(option)]


def step_row(step: Step) -> list[str]:
    times = (step.bound.memory_seconds, step.bound.compute_seconds, step.bound.network_seconds)
    return [
        step_name(step),
        human_bytes(step.cost.weight_bytes + step.cost.context_bytes),
        *map(_milliseconds, times),
        format_number(step.tokens_per_second),
        step.bound.binds,
    ]


def exchange_rows(plan: Plan) -> list[list[str]]:
    """Returns the rows of EXCHANGE_COLUMNS: a device's exchanges in the decode of all requests that fit."""
    decodes = [step for step in plan.chosen.steps if step.name == "decode"]
    layout = plan.chosen.layout
    return [
        [
            exchange.opcode,
            exchange.name,
            f"{exchange.group_size} {' x '.join(exchange.axes)}",
            str(exchange.count),
            human_bytes(int(exchange.sent_bytes)),
            _milliseconds(exchange_seconds(exchange, plan.target, layout)),
            links(exchange, plan.target, layout),
        ]
        for exchange in (decodes[-1].cost.exchanges if decodes else ())
    ]


def steps_title(plan: Plan) -> str:
    if plan.chosen.layout.pipeline_parallel_size == 1:
        return "Steps, on each device"
    return "Steps, on a device of the stage that takes longest; tokens/s through all stages"


def summary_row(plan: Plan) -> list[str]:
    chosen = plan.chosen
    if not chosen.fits:
        return [str(plan.target), "", "", "", "", "", "", "does not fit"]
    state = "" if chosen.hosts_of_server == 1 else f"on {chosen.hosts_of_server} hosts"
    sizes = (chosen.layout.num_devices, chosen.num_servers, chosen.max_requests)
    return [str(plan.target), _weights(chosen), *map(str, sizes), *_rates(chosen), state]


def _print_plan(report: PlanReport, plan: Plan, console: Console) -> None:
    console.print(Text(f"{plan.target}: {data_sheet(plan)}"))
    style = "green" if plan.chosen.fits else "red"
    console.print(Text(verdict(plan), style=style))
    for remark in remarks(plan):
        console.print(Text(remark))
    if (line := command(report, plan)) is not None:
        console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
    rows = ((option is plan.chosen, option_row(option)) for option in shown_options(plan))
    _print_table(
        console,
        f"Ways to serve requests of {plan.context_len} tokens; 1 request, all: tokens/s at most",
        OPTION_COLUMNS,
        ([f"{'>' if is_chosen else ' '} {row[0]}", *row[1:]] for is_chosen, row in rows),
    )
    if plan.chosen.steps:
        _print_table(console, steps_title(plan), STEP_COLUMNS, map(step_row, plan.chosen.steps))
        if rows := exchange_rows(plan):
            title = f"Exchanges of a {step_name(plan.chosen.steps[-2])}, on each device"
            _print_table(console, title, EXCHANGE_COLUMNS, rows)
        console.print(Text(f"  {source_line(plan)}"))
        for name, line in compiled_lines(plan):
            console.print(Text(f"  {name}: {line}"))


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="cyan")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < index < len(columns) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(Padding(table, (0, 0, 0, 2)))


def _weights(option: PlanOption) -> str:
    return option.weights if option.kv_cache_dtype == "auto" else f"{option.weights}, {option.kv_cache_dtype} cache"


def _rates(option: PlanOption) -> tuple[str, str]:
    rates = decode_rates(option)
    return ("", "") if rates is None else (format_number(rates[0]), format_number(rates[1]))


def _milliseconds(seconds: float) -> str:
    return f"{format_number(1000 * seconds)} ms"
