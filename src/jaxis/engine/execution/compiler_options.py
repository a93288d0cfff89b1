"""What XLA is asked for when it compiles a step's programs."""

from __future__ import annotations

from jaxis.kernels.platform import target_platform


def compiler_options() -> dict[str, int | bool] | None:
    """Options of `jax.jit` for programs that run on the current mesh."""
    platform = target_platform()
    if platform == "cpu":
        # What is rounded to bfloat16 or float16 stays rounded. Otherwise, it depends on what XLA fuses in steps of one
        # shape and not of another.
        return {"xla_allow_excess_precision": False}
    if platform != "gpu":
        return None
    # XLA would compute the products of one input with several small weights as one product, of weights that each step
    # first copies into one: those of queries, keys and values, of a feed-forward's halves, of a router.
    return {"xla_gpu_dot_merger_threshold_mb": 0}
