"""Formats an analysis for people, readable in 80 columns and without colours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxis.bringup.analyze.analysis import Analysis, KeyStatus
from jaxis.bringup.analyze.figures import Fit
from jaxis.bringup.analyze.module_tree import ModuleRow
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.host.byte_size import human_bytes

_STATUSES = ("unsupported", "unknown", "unread", "supported", "default", "neutral")
_LONGEST_VALUE = 40
_BLOCK_TYPES = "quantization_config.block_types."


def analysis_text(analysis: Analysis, console: Console, *, verbose: bool = False) -> str:
    """Formats an analysis for the console's width and colours; `verbose` adds the keys that have no effect."""
    with console.capture() as capture:
        _print(analysis, console, verbose=verbose)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _print(analysis: Analysis, console: Console, *, verbose: bool) -> None:
    console.print(Text(f"{analysis.model}  {', '.join(analysis.architectures)}", style="bold"))
    if analysis.can_run:
        console.print(Text("can run", style="green"))
    else:
        count = len(analysis.problems)
        console.print(Text(f"cannot run, for {count} reason{'s' if count > 1 else ''}:", style="red"))
        for problem in analysis.problems:
            console.print(_hanging("-", Text(problem)))
    if analysis.modules is not None:
        _section(console, "Modules (each with --tree)", [_module_row(row) for row in analysis.modules if row.is_told])
    _section(console, "Keys of config.json", _key_rows(analysis, verbose=verbose))
    _section(console, "Weights", _weight_rows(analysis))
    for problem in analysis.tensor_problems or ():
        words = f"{problem.kind}, {problem.count} x {problem.names}: {problem.reason}"
        console.print(Padding(_hanging("-", Text(words)), (0, 0, 0, 2)))
    if analysis.kv_cache is not None:
        _section(console, f"KV cache in {analysis.kv_cache_dtype}", _cache_rows(analysis))
    if analysis.memory is not None:
        memory = analysis.memory
        title = f"Fits {ACCELERATOR_MEMORY_SHARE:.0%} of {memory.name}, {human_bytes(memory.nbytes)}"
        _section(console, title, [(fit.weights, _fit_text(fit)) for fit in memory.fits])
    if analysis.closest_families:
        name = analysis.architectures[0] if analysis.architectures else "NewModel"
        name = re.sub(r"For[A-Z]\w*$", "", name)
        console.print(Text(f"\nto start: jaxis new-model {name} --like {analysis.closest_families[0].like}"))
    if analysis.can_run:
        console.print(Text("\njaxis plan says how it fits on TPUs and GPUs, and how fast it can be there"))


def tree_text(modules: Sequence[ModuleRow], console: Console) -> str:
    """Formats the modules of a model in the order of their calls: the forward pass, with the files to read."""
    files: set[str] = set()
    with console.capture() as capture:
        for row in modules:
            line = Text(f"{row.name or 'model'} ", style="cyan")
            line.append(row.module, style="bold")
            line.append(f" ({row.file})" if row.file not in files else "", style="dim")
            line.append(f"  {row.shapes}" if row.shapes else "", style="green")
            line.append(f"  {', '.join(row.settings)}" if row.settings else "")
            files.add(row.file)
            console.print(Padding(line, (0, 0, 0, 2 * row.depth)))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def human_count(count: int) -> str:
    """Formats a number of parameters: "494 M", "30.53 B"."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _section(console: Console, title: str, rows: Iterable[tuple[str, Text | str]]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=24, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="cyan"), value if isinstance(value, Text) else Text(value))
    console.print(Padding(table, (0, 0, 0, 2)))


def _hanging(mark: str, text: Text) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table


def _module_row(row: ModuleRow) -> tuple[str, str]:
    return f"{' ' * row.depth}{row.name}", ", ".join([row.module, *row.settings])


def _key_rows(analysis: Analysis, *, verbose: bool) -> Iterable[tuple[str, Text | str]]:
    for status in _STATUSES:
        keys = [key for key in analysis.keys if key.status == status]
        if not keys:
            continue
        shown = ", ".join(_shown_keys(keys))
        if status == "neutral" and not verbose:
            shown = "cannot change logits"
        style = "red" if status in ("unsupported", "unknown") else ""
        yield f"{len(keys)} {status}", Text(shown, style=style)


def _shown_keys(keys: Sequence[KeyStatus]) -> Iterator[str]:
    """Yields each key with its value; for a GGUF file's tensors, the number of each type of blocks."""
    block_types = Counter(str(key.value) for key in keys if key.key.startswith(_BLOCK_TYPES))
    if block_types:
        yield f"{_BLOCK_TYPES[:-1]}: " + ", ".join(f"{count} x {name}" for name, count in block_types.most_common())
    for key in keys:
        if not key.key.startswith(_BLOCK_TYPES):
            yield f"{key.key}={_short(key.value)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _weight_rows(analysis: Analysis) -> Iterable[tuple[str, str]]:
    if (count := analysis.parameters) is not None:
        words = f"{human_count(count.total)} ({count.total:,})"
        if count.experts:
            words += f", of which experts {human_count(count.experts)}"
        yield "parameters", words
        is_tied = count.active + count.embedding > count.total
        besides = "" if is_tied else f", besides {human_count(count.embedding)} of embeddings looked up"
        yield "active for a token", human_count(count.active) + besides
    if analysis.bytes_by_dtype is not None:
        of_each = ", ".join(f"{dtype} {human_bytes(nbytes)}" for dtype, nbytes in analysis.bytes_by_dtype.items())
        yield "checkpoint", f"{analysis.num_tensors} tensors: {of_each}"
    if analysis.tensor_problems is None:
        yield "tensors", f"not checked: {analysis.no_tensors_reason}"
    elif analysis.tensor_problems:
        yield "tensors", "do not match:"
    else:
        yield "tensors", f"all {analysis.num_tensors} match"


def _cache_rows(analysis: Analysis) -> Iterable[tuple[str, str]]:
    kinds = [kind for kind in analysis.kv_cache or () if kind.kind != "state"]
    for kind in kinds:
        limit = f", of the last {kind.max_tokens} tokens" if kind.max_tokens else ""
        per_token = human_bytes(kind.bytes_per_token)
        yield f"{kind.layers} x {kind.kind}", f"{per_token} a token ({kind.bytes_per_token} bytes){limit}"
    if len(kinds) > 1:
        total = sum(kind.bytes_per_token for kind in kinds)
        yield "together", f"{human_bytes(total)} a token ({total} bytes)"
    for kind in analysis.kv_cache or ():
        if kind.kind == "state":
            size = f"{human_bytes(kind.bytes_per_token)} a sequence ({kind.bytes_per_token} bytes), of any length"
            yield f"{kind.layers} x state", size


def _fit_text(fit: Fit) -> Text:
    size = f"{human_bytes(fit.weight_bytes)} of weights"
    if not fit.fits:
        return Text(f"no: {size}", style="red")
    return Text(f"yes: {size}, and a context of {fit.context_tokens} tokens", style="green")
