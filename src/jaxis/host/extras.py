"""Optional dependencies: the modules of each extra, and the error for an extra that is not installed."""

from __future__ import annotations

import importlib.util

from jaxis.errors import ConfigError

# Extra -> the modules that its distributions in pyproject.toml bring, without those that other dependencies bring too.
EXTRAS = {
    "server": ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn"),
    "orbax": ("orbax.checkpoint", "tensorstore"),
    "gguf": ("gguf",),
    "kv-events": ("msgspec", "zmq"),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "vision": ("PIL",),
    "ray": ("ray.serve", "ray.data", "pyarrow"),
}


def missing_module(extra: str) -> str | None:
    """Returns a module of the extra that is not installed; None if all are. Nothing is imported."""
    return next((name for name in EXTRAS[extra] if not _is_installed(name)), None)


def check_extra(extra: str, what: str) -> None:
    """Raises ConfigError if an extra is not, or only partly, installed; `what` needs it and begins the error."""
    if (module := missing_module(extra)) is not None:
        raise ConfigError(f"{what} needs {module.partition('.')[0]}: pip install 'jaxis[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent package is missing
        return False
