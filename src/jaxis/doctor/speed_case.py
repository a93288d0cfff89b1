"""A short decode benchmark, beside the least time that the device's data sheet allows."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxis.bench.run import Load, run_batch
from jaxis.bench.session import build_sized_engine
from jaxis.bringup.analyze.source import open_source
from jaxis.compilation.accelerators import ACCELERATORS, Accelerator
from jaxis.compilation.targets import Target
from jaxis.doctor.check import Case
from jaxis.engine.engine import LLMEngine
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.host.progress import ProgressDisplay
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.roofline import bound

# The sizes of Qwen3-0.6B: large enough that a step reads more than it waits, small enough for any accelerator.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
_BATCH_SIZES = (1, 16)
_INPUT_LEN, _OUTPUT_LEN = 128, 33
_MAX_LEN = 1024


def speed_cases() -> Iterator[Case]:
    """Yields a decode of one request and of several: random weights of a real size, but on CPU the embedded model."""
    is_cpu = jax.local_devices()[0].platform == "cpu"
    yield Case("speed", f"decode of {'the embedded model' if is_cpu else 'random weights, Qwen3-0.6B'}", _measure)


def _measure() -> str:
    device = jax.local_devices()[0]
    with tempfile.TemporaryDirectory(prefix="jaxis_doctor_") as folder:
        arguments: dict[str, Any] = {}
        model = EMBEDDED_MODEL
        if device.platform != "cpu":
            model = Path(folder)
            (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
            arguments["load_format"] = "dummy"
        engine = build_sized_engine(
            str(model),
            arguments,
            max_num_seqs=max(_BATCH_SIZES),
            max_model_len=_MAX_LEN,
            progress=ProgressDisplay(False),
        )
        try:
            steps = {batch_size: _step_seconds(engine, batch_size) for batch_size in _BATCH_SIZES}
        finally:
            engine.close()
        accelerator = next((each for each in ACCELERATORS.values() if each.device_kind == device.device_kind), None)
        least = {} if accelerator is None else least_seconds(str(model), accelerator)
    parts = []
    for batch_size, seconds in steps.items():
        requests = f"{batch_size} request{'s' if batch_size > 1 else ''}"
        words = f"{requests}: {1000 * seconds:.2f} ms a step, {batch_size / seconds:.0f} tokens/s"
        if batch_size in least:
            words += f", {seconds / least[batch_size]:.1f} times the least of {1000 * least[batch_size]:.2f} ms"
        parts.append(words)
    if not least:
        parts.append("no data sheet of this device is known, so there is no bound to compare with")
    return "; ".join(parts)


def _step_seconds(engine: LLMEngine, batch_size: int) -> float:
    """Returns the median time of a decode step, from the second of two runs: the first compiles."""
    rng = np.random.default_rng(0)
    load = Load(batch_size, _INPUT_LEN, _OUTPUT_LEN)
    run_batch(engine, load, rng)
    return statistics.median(run_batch(engine, load, rng).step_seconds)


def least_seconds(model: str, accelerator: Accelerator) -> dict[int, float]:
    """Maps a batch size to the bound of a decode step on one such device."""
    target = Target(accelerator, 1)
    part = Planner(open_source(model), Wanted(quantization="none", kv_cache_dtype="auto")).device_model(target)
    context = _INPUT_LEN + _OUTPUT_LEN // 2
    return {size: bound(part.decode(size, context), target, part.layout).seconds for size in _BATCH_SIZES}
