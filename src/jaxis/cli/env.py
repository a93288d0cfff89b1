"""`jaxis env` and `jaxis doctor`: the facts of this installation, and a check that it computes correctly."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import EXIT_ERROR, note, report_errors, write_files
from jaxis.cli.options import Debug, JsonAnswer, ReportFolder
from jaxis.host.cores import usable_cores
from jaxis.host.machine import cpu_flags, cpu_model
from jaxis.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "huggingface_hub")
# Extra -> distributions of which one shows that the extra is installed.
_EXTRAS = {
    "server": ("fastapi",),
    "orbax": ("orbax-checkpoint",),
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "tpu": ("libtpu",),
    "test": ("pytest",),
    "verify": ("transformers",),
    "bench": ("llama-cpp-python",),
}
_SIMD_FLAG = re.compile(r"sse4|avx|fma|f16c|amx|asimd|neon|sve|sme(?!p)|bf16|i8mm")


def env(
    as_json: JsonAnswer = False,
    debug: Debug = False,
) -> None:
    """Show versions, devices, CPU, native kernels and the cache of compiled programs.

    \b
    [bold]Examples[/bold]
      jaxis env
      jaxis env --json | jq .devices
    """
    with report_errors(debug=debug):
        facts = collect()
        if as_json:
            print(json.dumps(facts, indent=2))
            return
        for name, value in facts.items():
            print(f"{name.removesuffix('_bytes') + ':':<17}{_to_text(name, value)}")


def collect() -> dict[str, Any]:
    """Collects all facts that `jaxis env` shows, as JSON values; sizes in bytes."""
    import psutil

    from jaxis.kernels import native

    return {
        "jaxis": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        **{package: _version_of(package) for package in _PACKAGES},
        "extras": [extra for extra, marks in _EXTRAS.items() if any(_version_of(mark) for mark in marks)],
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical, {usable_cores()} usable",
        "simd": [flag for flag in cpu_flags() if _SIMD_FLAG.match(flag)],
        "native_kernels": native.status(),
        "memory_bytes": {"total": psutil.virtual_memory().total, "available": psutil.virtual_memory().available},
        **_memory_nodes(),
        "devices": _devices(),
        "program_cache": _program_cache(),
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[str, dict[str, str]]:
    """Reads the cores of each memory node, by Linux's number of it; empty where all memory is equally near."""
    nodes = {path.name: (path / "cpulist").read_text().strip() for path in sorted(folder.glob("node[0-9]*"))}
    if len(nodes) < 2:
        return {}
    facts = {name: f"cores {cores or 'none'}" for name, cores in nodes.items()}
    if len(near := [name.removeprefix("node") for name, cores in nodes.items() if cores]) > 1:
        # Weights lie on the node whose core read them first; the other node's cores would wait for its memory.
        facts["start"] = f"numactl --interleave={','.join(near)} jaxis serve, or a server a node: numactl -N 0 -m 0"
    return {"memory_nodes": facts}


def _devices() -> list[dict[str, Any]] | str:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a driver that does not match, an accelerator that is busy
        return f"none: {' '.join(str(error).split())}"
    facts = []
    for device in devices:
        fact: dict[str, Any] = {"name": str(device), "kind": device.device_kind}
        if stats := device.memory_stats():  # None on CPU, where the device's memory is the machine's
            fact["memory_bytes"] = {"total": stats.get("bytes_limit"), "in_use": stats.get("bytes_in_use")}
        facts.append(fact)
    return facts


def _program_cache() -> dict[str, Any]:
    import jax

    from jaxis.engine.execution.program_files import default_cache_dir

    folder = Path(jax.config.values["jax_compilation_cache_dir"] or default_cache_dir())
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {"folder": str(folder), "files": len(files), "size_bytes": sum(path.stat().st_size for path in files)}


def _to_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ("; " if name == "devices" else " ").join(_to_text("", item) for item in value) or "none"
    if isinstance(value, dict):
        in_bytes = name.endswith("_bytes")
        items = (_to_text("_bytes" if in_bytes else key, item) for key, item in value.items())
        return ", ".join(f"{key.removesuffix('_bytes')} {item}" for key, item in zip(value, items, strict=True))
    if value is None:
        return "unknown" if name.endswith("_bytes") else "not installed"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    return str(value)


def doctor(
    output: ReportFolder = Path("jaxis-doctor"),
    as_json: JsonAnswer = False,
    debug: Debug = False,
) -> None:
    """Check kernels, a model and its speed on this machine's devices, and write a report to send.

    Runs each kernel against its definition in float64, and the embedded model, whose answers are known word for word.
    Times a decode beside the least time that the device's data sheet allows.
    Writes doctor.md and doctor.json. Takes a minute or two, and nothing is sent anywhere.
    Exits with 1 if something is wrong, and 3 if it could not run.

    \b
    [bold]Examples[/bold]
      jaxis doctor
      jaxis doctor --output report --json | jq .passed
    """
    with report_errors(debug=debug, command="doctor", as_json=as_json):
        from rich.console import Console

        from jaxis.doctor.check import Check
        from jaxis.doctor.examination import examine

        def show(check: Check) -> None:
            if not as_json:
                mark = "ok    " if check.passed else "FAILED"
                print(f"{mark} {check.area}: {check.name}: {check.detail} ({check.seconds:.1f} s)", flush=True)

        with Console(stderr=True).status("Starting") as status:
            found = examine(collect(), on_start=lambda case: status.update(f"{case.area}: {case.name}"), on_check=show)
        files = {"doctor.md": found.to_markdown(), "doctor.json": found.to_json()}
        write_files(output, files)
        print(found.to_json() if as_json else found.subject)
        wrong, written = sum(not check.passed for check in found.checks), [str(output / name) for name in files]
        note(f"{wrong or 'none'} of {len(found.checks)} checks failed; wrote {' and '.join(written)}")
    if not found.passed:
        raise typer.Exit(EXIT_ERROR)


COMMANDS = (Command("doctor", doctor, "doctor"), Command("env", env))
