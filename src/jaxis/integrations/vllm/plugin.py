"""vLLM's entry points. They act only where VLLM_PLUGINS names jaxis: jaxis beside another vLLM changes nothing."""

from __future__ import annotations

import os

NAME = "jaxis"


def is_wanted() -> bool:
    """Whether the user asks vLLM for jaxis."""
    return NAME in (name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(","))


def platform() -> str | None:
    """The platform's class, for `vllm.platform_plugins`. Must not raise: vLLM would silently take another platform."""
    return "jaxis.integrations.vllm.platform.JaxisPlatform" if is_wanted() else None


def register() -> None:
    """Registers the models, for `vllm.general_plugins`; vLLM may call it several times in a process."""
    if is_wanted():
        from jaxis.integrations.vllm.model_shims import register_models

        register_models()
