"""Measures this machine with engines of random weights, whose times are solved for the constants of `Machine`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxis.bench.limits import Limits, measure_limits
from jaxis.bench.run import Load
from jaxis.bringup.analyze.source import open_source
from jaxis.engine.memory_account import MemoryAccount
from jaxis.host.cores import usable_cores
from jaxis.layers.module import named_parameters
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.planning.machine import MOST_DECODED, ROWS, WIDTHS, Machine, doubled, facts
from jaxis.planning.step_time import Work, work_of
from jaxis.planning.trial import Trial, run_trial
from jaxis.planning.widths import widths

_LONG = 2048
LOADS = (Load(1, 128, 16), Load(4, 32, 16), Load(16, 32, 16), Load(1, 512, 1), Load(1, _LONG, 16))
_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
# Layers whose products take next to no time.
_THIN = _DENSE | {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 1024}
_STATES = _THIN | {
    "num_hidden_layers": 20,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 5,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# Name -> config, quantization. Each adds one unknown constant of a step, so they are as many as those.
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "few": (_THIN | {"num_hidden_layers": 4}, None),
    "many": (_THIN | {"num_hidden_layers": 24}, None),
    "bfloat16": (_DENSE, None),
    "int8": (_DENSE, "int8"),
    "int4": (_DENSE, "int4"),
    "float32": (_DENSE | {"num_hidden_layers": 4, "dtype": "float32"}, None),
    "state": (_STATES, None),
}


class Engine(NamedTuple):
    """A measured engine, the work of its model, and the bytes of its weights and of the cache of its first prompt."""

    work: Work
    trial: Trial
    held_bytes: int


def measure(on_stage: Callable[[str], object] = lambda _: None) -> Machine:
    """Measures this machine, in about four minutes. Raises EngineError if a process fails."""
    most = usable_cores()
    on_stage(f"measuring this machine's memory and arithmetic with 1 to {most} threads")
    limits = tuple(measure_limits(threads) for threads in sorted({most, *doubled(most)}))
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory(prefix="jaxis_plan_") as temporary:
        disk = 0.0
        for number, (name, (config, quantization)) in enumerate(MODELS.items(), 1):
            on_stage(f"measuring this machine: {number} of {len(MODELS)}, {name}")
            folder = Path(temporary, "-".join(map(str, (config["model_type"], *_sizes(config)))))
            if not folder.exists():
                _write(folder, config)
            if name == "bfloat16":
                disk = _read_bytes_per_second(folder / "model.safetensors")
            width = widths(open_source(folder), quantization or "none")[0]
            loads = LOADS if name == "many" else LOADS[:-1]
            work = work_of(width)
            account = MemoryAccount(width.vllm_config, [work.part.place()])
            held_bytes = account.held_bytes + account.needed_bytes(loads[0].input_len)
            engines[name] = Engine(work, run_trial(folder, quantization, loads), held_bytes)
    return solve(engines, limits, disk)


def solve(engines: Mapping[str, Engine], limits: tuple[Limits, ...], disk_bytes_per_second: float) -> Machine:
    """Computes the constants from the engines of `MODELS`."""
    many = engines["many"]
    short, *_, middle, long = many.trial.timings
    part = many.work.part
    # Attention beyond the first tokens is what longer contexts add.
    near, far = (part.context(np.array([length + 7]), is_one_request=True)[0] for length in (128, _LONG))
    context_byte = max(0.0, (long.step_seconds - short.step_seconds) / (far - near))
    chunks = _LONG // ROWS[-1]
    more = _flops(many.work, _LONG) - chunks * _flops(many.work, ROWS[-1])
    attention_flop = max(0.0, (long.prefill_seconds - chunks * middle.prefill_seconds) / more)

    curves: dict[str, list[float]] = {name: [] for name in ("step", "layer", *WIDTHS, "state")}
    for rows in ROWS:
        seconds: list[float] = []
        units: list[dict[str, float]] = []
        for work, trial, _ in engines.values():
            terms = work.terms()
            if rows <= MOST_DECODED:
                index = ROWS.index(rows)
                positions = np.full(rows, LOADS[index].input_len + LOADS[index].output_len // 2)
                timing = trial.timings[index].step_seconds
                timing -= work.part.context(positions, is_one_request=False)[0] * context_byte
                terms |= {width: terms.get(width, 0.0) + count for width, count in work.head.items()}
            else:
                timing = trial.timings[0 if rows == ROWS[-2] else len(LOADS) - 2].prefill_seconds
                timing -= sum(count * curves[width][0] for width, count in work.head.items())
                timing -= _flops(work, rows) * attention_flop
            seconds.append(timing)
            units.append(terms)
        for name, value in solve_constants(units, seconds).items():
            curves[name].append(value)

    of_floats = [engine for name, engine in engines.items() if name != "state"]
    starts = solve_constants(
        [{"ready": 1.0, "layer": work.part.num_layers, **work.elements} for work, *_ in of_floats],
        [trial.start_seconds - trial.timings[0].prefill_seconds for _, trial, _ in of_floats],
    )
    process = solve_constants(
        [{"base": 1.0, "layer": work.part.num_layers} for work, *_ in engines.values()],
        [trial.peak_bytes - held_bytes for _, trial, held_bytes in engines.values()],
    )
    barriers = solve_constants(
        [{"step": 1.0, "layer": work.part.num_layers} for work, *_ in of_floats],
        [max(1.0, trial.step_barriers) for _, trial, _ in of_floats],
    )
    return Machine(
        facts=facts(),
        limits=limits,
        disk_bytes_per_second=disk_bytes_per_second,
        step=tuple(curves["step"]),
        layer=tuple(curves["layer"]),
        step_barriers=barriers["step"],
        layer_barriers=barriers["layer"],
        products={name: tuple(curves[name]) for name in WIDTHS},
        state=tuple(curves["state"]),
        context_byte=context_byte,
        attention_flop=attention_flop,
        ready=starts["ready"],
        layer_ready=starts["layer"],
        element_ready={name: starts[name] for name in WIDTHS},
        base_bytes=process["base"],
        layer_bytes=process["layer"],
    )


def solve_constants(units: Sequence[Mapping[str, float]], amounts: Sequence[float]) -> dict[str, float]:
    """Finds the constants by which each engine's units come to its amount, with the least relative errors.

    None is negative: one that would be is zero.
    """
    names = sorted(set().union(*units))
    found = dict.fromkeys(names, 0.0)
    while names:
        matrix = np.array([[row.get(name, 0.0) for name in names] for row in units]) / np.array(amounts)[:, None]
        scale = matrix.max(axis=0)
        values = np.linalg.lstsq(matrix / scale, np.ones(len(units)))[0]
        if values.min() >= 0:
            return found | dict(zip(names, (values / scale).tolist(), strict=True))
        del names[values.argmin()]
    return found


def _flops(work: Work, num_tokens: int) -> float:
    return work.part.context(np.arange(num_tokens), is_one_request=True)[1]


def _sizes(config: dict[str, Any]) -> tuple[Any, ...]:
    return config["hidden_size"], config["num_hidden_layers"], config["dtype"]


def _write(folder: Path, config: dict[str, Any]) -> None:
    """Writes a checkpoint with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = widths(open_source(folder), "none")[0].model()
    dtype = jnp.dtype(config["dtype"])
    specs = {name: TensorHeader(dtype, param.get_value().shape) for name, param in named_parameters(model)}
    noise = (0.02 * np.random.default_rng(0).standard_normal(1 << 20, np.float32)).astype(dtype)
    with SafetensorsWriter(folder / "model.safetensors", specs) as writer:
        for name, spec in specs.items():
            writer.write(name, np.resize(noise, spec.shape))


def _read_bytes_per_second(path: Path) -> float:
    """Reads a file that the system's cache no longer holds, where the system can be asked to drop it."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(1 << 24)
        start = time.perf_counter()
        while file.readinto(buffer):
            pass
        seconds = time.perf_counter() - start
    return path.stat().st_size / seconds
