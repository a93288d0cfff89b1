"""About how long a process of a comparison takes, for planning a run; nothing that is reported."""

from __future__ import annotations

from collections.abc import Sequence

from engines import BASELINE, Engine
from jaxis.bench.cost import PrefillCost
from jaxis.bench.limits import Limits
from jaxis.bench.run import Load

START_SECONDS = 6.0
# Of the measured limits, about as the engines reach them.
SHARE_OF_FLOPS = {"llama.cpp": 0.4}
OTHER_SHARE_OF_FLOPS = 0.8
SHARE_OF_READS = 0.6
SHORTENED_WARM_UP_TOKENS = 2048  # see `JaxisPeer.warm_up`
_BYTES_PER_PARAMETER = {"float32": 4.0, "bf16": 2.0, "int8": 1.1, "int4": 0.6, "gguf": 1.0}


def estimate_seconds(loads: Sequence[Load], cost: PrefillCost, engine: Engine, limits: Limits) -> float:
    """The seconds of one process.

    Args:
      loads: What it runs.
      cost: Of the model's prefill, which also tells its size.
      engine: Which engine.
      limits: Of the machine.
    """
    num_bytes = _BYTES_PER_PARAMETER[engine.width] * (cost.layer_params + cost.head_params)
    step_seconds = num_bytes / (SHARE_OF_READS * limits.memory_bytes_per_second)
    flops_per_second = SHARE_OF_FLOPS.get(engine.library, OTHER_SHARE_OF_FLOPS) * limits.flops_per_second
    seconds = START_SECONDS
    for load in loads:
        num_flops = cost.flops(load.batch_size, load.input_len)
        if engine.library in ("jaxis", BASELINE):  # warms up with the load
            warm_up_len = min(load.input_len, SHORTENED_WARM_UP_TOKENS) if load.batch_size == 1 else load.input_len
            num_flops += cost.flops(load.batch_size, warm_up_len)
        seconds += num_flops / flops_per_second + load.output_len * step_seconds
    return seconds
