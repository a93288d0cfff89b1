"""Names of a quantized checkpoint's tensors: publishers' own names, and names of tensors that nothing here uses."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

_logger = logging.getLogger(__name__)

# Not `correct_output_scale`, a parameter of Gemma 3n.
_OF_ACTIVATIONS = re.compile(
    r"(?!correct_)(.*_)?(input|output|activation)_((global_)?scale|zero_point)|(.*_)?input_scale_ub|qscale_act"
)
_OF_KV_CACHE = re.compile(r"[qkv]_(scale|zero_point)|kv_scale|prob_(output_)?scale")
_OF_STACK = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj)_(scale|scale_inv)")


class TensorNames:
    """Translates the last part of names in the file to names in layers. Logs each kind of unused tensor once."""

    def __init__(self, renames: Mapping[str, str] | None = None) -> None:
        self._renames = dict(renames or {})
        self._said: set[str] = set()

    def translated(self, name: str) -> str | None:
        """Returns a layer's name for a tensor in the file; None if the tensor is not used."""
        module, dot, last = name.rpartition(".")
        if _OF_ACTIVATIONS.fullmatch(last) or _OF_KV_CACHE.fullmatch(last):
            return None
        if match := _OF_STACK.fullmatch(last):
            return f"{module}{dot}{match[1]}_{self._renames.get(f'weight_{match[2]}', f'weight_{match[2]}')}"
        return f"{module}{dot}{self._renames.get(last, last)}"

    def say_if_unused(self, name: str) -> None:
        """Logs that tensors like this one are not used, at the first one."""
        module, _, last = name.rpartition(".")
        if _OF_KV_CACHE.fullmatch(last) or (last.startswith("output_") and module.endswith(("k_proj", "v_proj"))):
            self._say("the checkpoint's scales of a quantized KV cache are not used: the cache has its own type")
        elif _OF_ACTIVATIONS.fullmatch(last):
            self._say(
                "the checkpoint's fixed scales of activations are not used: activations are quantized dynamically or "
                "not at all, which is more accurate"
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _logger.warning(message)
