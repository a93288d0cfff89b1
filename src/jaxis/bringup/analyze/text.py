"""Formats an analysis for people, readable in 80 columns and without colours."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxis.bringup.analyze.analysis import Analysis, SizeFigures
from jaxis.bringup.analyze.finding import ModelFinding
from jaxis.bringup.analyze.module_tree import ModuleRow
from jaxis.config.hf_config import KeyUse
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.host.byte_size import human_bytes

_USES = ("refused", "unread", "used", "default", "neutral", "ignored")
_NO_EFFECT = ("neutral", "ignored")
_LONGEST_VALUE = 40
_BLOCK_TYPES = "quantization_config.block_types."
_Rows = Iterable[tuple[str, str]]


def analysis_text(analysis: Analysis, console: Console, *, verbose: bool = False) -> str:
    """Formats an analysis for the console's width and colours; `verbose` adds the keys that have no effect."""
    with console.capture() as capture:
        console.print(Text(f"{analysis.model}  {', '.join(analysis.architectures)}", style="bold"))
        reasons = [*_reasons(analysis.findings)]
        verdict = f"cannot run, for {len(reasons)} reason{'s'[: len(reasons) > 1]}:" if reasons else "can run"
        console.print(Text(verdict, style="red" if reasons else "green"))
        _grid(console, [("-", reason) for reason in reasons], indent=0)
        if analysis.modules is not None:
            console.print(Text("\nModules (each with --tree)", style="bold"))
            _print_tree(console, [row for row in analysis.modules if row.is_told])
        for title, rows in _sections(analysis, verbose=verbose):
            console.print(Text(f"\n{title}", style="bold"))
            _grid(console, rows)
        if analysis.closest_families:
            name = re.sub(r"For[A-Z]\w*$", "", next(iter(analysis.architectures), "NewModel"))
            console.print(Text(f"\nto start: jaxis new-model {name} --like {analysis.closest_families[0]}"))
        if analysis.can_run:
            console.print(Text("\njaxis plan says how it fits on TPUs and GPUs, and how fast it can be there"))
    return _stripped(capture.get())


def tree_text(modules: Sequence[ModuleRow], console: Console) -> str:
    """Formats the modules of a model, each with its file where that is new."""
    with console.capture() as capture:
        _print_tree(console, modules)
    return _stripped(capture.get())


def human_count(count: int) -> str:
    """Formats a number of parameters: "494 M", "30.53 B"."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _reasons(findings: Iterable[ModelFinding]) -> Iterator[str]:
    """Yields findings in words, those that differ in names alone as one."""
    for alike, group in itertools.groupby(findings, key=lambda finding: replace(finding, names=())):
        yield str(replace(alike, names=tuple(name for finding in group for name in finding.names)))


def _stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _print_tree(console: Console, modules: Sequence[ModuleRow]) -> None:
    files: set[str] = set()
    for row in modules:
        line = Text(f"{row.name or 'model'} ", style="cyan")
        line.append(row.module, style="bold")
        line.append(f" ({row.file})" if row.file not in files else "", style="dim")
        line.append(f"  {row.shapes}" if row.shapes else "", style="green")
        line.append(f"  {', '.join(row.settings)}" if row.settings else "")
        files.add(row.file)
        console.print(Padding(line, (0, 0, 0, 2 * row.depth)))


def _grid(console: Console, rows: _Rows, indent: int = 2) -> None:
    table = Table.grid(padding=(0, indent or 1))
    table.add_column(max_width=24, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="cyan"), Text(value))
    if table.row_count:
        console.print(Padding(table, (0, 0, 0, indent)))


def _sections(analysis: Analysis, *, verbose: bool) -> Iterator[tuple[str, _Rows]]:
    """Yields the title and the rows of each section."""
    yield "Keys of config.json", _key_rows(analysis, verbose=verbose)
    yield "Weights", _weight_rows(analysis)
    if (sizes := analysis.sizes) is not None:
        yield f"KV cache in {sizes.kv_cache_dtype}", _cache_rows(sizes)
        memory = f"{sizes.memory_name}, {human_bytes(sizes.memory_bytes)}"
        yield f"Fits {ACCELERATOR_MEMORY_SHARE:.0%} of {memory}", _fit_rows(sizes)


def _key_rows(analysis: Analysis, *, verbose: bool) -> _Rows:
    for use in _USES:
        if keys := [key for key in analysis.keys if key.use == use]:
            is_told = verbose or use not in _NO_EFFECT
            yield f"{len(keys)} {use}", ", ".join(_shown_keys(keys)) if is_told else "cannot change logits"


def _shown_keys(keys: Sequence[KeyUse]) -> Iterator[str]:
    """Yields each key with its value; for a GGUF file's tensors, the number of each type of blocks."""
    block_types = Counter(str(key.value) for key in keys if key.key.startswith(_BLOCK_TYPES))
    if block_types:
        yield f"{_BLOCK_TYPES[:-1]}: " + ", ".join(f"{count} x {name}" for name, count in block_types.most_common())
    for key in keys:
        if not key.key.startswith(_BLOCK_TYPES):
            value = str(key.value)
            yield f"{key.key}={value if len(value) <= _LONGEST_VALUE else f'{value[:_LONGEST_VALUE]}...'}"


def _weight_rows(analysis: Analysis) -> _Rows:
    if analysis.sizes is not None:
        count = analysis.sizes.parameters
        of_experts = f", of which experts {human_count(count.experts)}" if count.experts else ""
        yield "parameters", f"{human_count(count.total)} ({count.total:,}){of_experts}"
        is_tied = count.active + count.embedding > count.total
        besides = "" if is_tied else f", besides {human_count(count.embedding)} of embeddings looked up"
        yield "active for a token", human_count(count.active) + besides
    if analysis.bytes_by_dtype is not None:
        of_each = ", ".join(f"{dtype} {human_bytes(nbytes)}" for dtype, nbytes in analysis.bytes_by_dtype.items())
        yield "checkpoint", f"{analysis.num_tensors} tensors: {of_each}"
    if analysis.not_checked:
        yield "tensors", f"not checked: {analysis.not_checked}"
    else:
        differ = any(finding.code in ("refused_tensor", "unfilled_parameter") for finding in analysis.findings)
        yield "tensors", "do not match" if differ else f"all {analysis.num_tensors} match"


def _cache_rows(sizes: SizeFigures) -> _Rows:
    for kind in sizes.kv_cache:
        limit = f", of the last {kind.max_tokens} tokens" if kind.max_tokens else ""
        of = "a sequence" if kind.kind == "state" else "a token"
        limit = ", of any length" if kind.kind == "state" else limit
        size = f"{human_bytes(kind.bytes_per_token)} {of} ({kind.bytes_per_token} bytes)"
        yield f"{kind.layers} x {kind.kind}", size + limit
    of_tokens = [kind.bytes_per_token for kind in sizes.kv_cache if kind.kind != "state"]
    if len(of_tokens) > 1:
        yield "together", f"{human_bytes(sum(of_tokens))} a token ({sum(of_tokens)} bytes)"


def _fit_rows(sizes: SizeFigures) -> _Rows:
    for fit in sizes.fits:
        context = f", and a context of {fit.context_tokens} tokens" if fit.fits else ""
        yield fit.weights, f"{'yes' if fit.fits else 'no'}: {human_bytes(fit.weight_bytes)} of weights{context}"
