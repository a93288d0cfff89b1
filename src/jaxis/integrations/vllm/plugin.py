"""Entry points for vLLM. They act only if VLLM_PLUGINS names jaxis, so that other uses of vLLM are unaffected."""

from __future__ import annotations

import os

NAME = "jaxis"


def is_wanted() -> bool:
    """Returns whether VLLM_PLUGINS names jaxis."""
    return NAME in (name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(","))


def platform() -> str | None:
    """Returns the platform's class for `vllm.platform_plugins`. Never raises: vLLM would use another one silently."""
    return "jaxis.integrations.vllm.platform.JaxisPlatform" if is_wanted() else None


def register() -> None:
    """Registers the models for `vllm.general_plugins`. vLLM may call it several times in a process."""
    if is_wanted():
        from jaxis.integrations.vllm.model_shims import register_models

        register_models()
