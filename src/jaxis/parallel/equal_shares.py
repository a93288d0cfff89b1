from __future__ import annotations

from jaxis.errors import ConfigError


def check_heads(num_heads: int | None, num_kv_heads: int, tensor_parallel_size: int) -> None:
    """Raises ConfigError if devices cannot share H attention heads (None: any number will do) equally.

    With fewer key-value heads K than devices, each device has a copy of one.
    """
    if _can_share(num_heads, num_kv_heads, tensor_parallel_size):
        return
    sizes = [size for size in range(1, tensor_parallel_size) if _can_share(num_heads, num_kv_heads, size)]
    choice = " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), *map(str, sizes[-1:]))))
    advice = f"give {choice}"
    if num_heads is not None and num_heads % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the model's {num_heads} attention heads: "
            f"{advice}"
        )
    raise ConfigError(
        f"tensor_parallel_size={tensor_parallel_size} and the model's {num_kv_heads} key-value heads: one must divide "
        f"the other: {advice}"
    )


def _can_share(num_heads: int | None, num_kv_heads: int, num_devices: int) -> bool:
    divides_queries = num_heads is None or num_heads % num_devices == 0
    return divides_queries and (num_kv_heads % num_devices == 0 or num_devices % num_kv_heads == 0)


def check_experts(num_experts: int, num_devices: int) -> None:
    """Raises ConfigError unless all devices that run the model can have equally many of a layer's experts."""
    if num_experts % num_devices == 0:
        return
    sizes = [size for size in range(1, num_devices) if num_experts % size == 0]
    choice = " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
    raise ConfigError(
        f"enable_expert_parallel: {num_devices} devices cannot have equally many of a layer's {num_experts} experts: "
        f"give {choice}, or leave it out, so that every device has a part of each expert"
    )
