"""The argument of speculative decoding."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig, parse_speculative_config
from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.devices import DeviceArguments
from jaxis.engine.argument_groups.info import argument
from jaxis.errors import ConfigError


@dataclass(frozen=True)
class SpeculationArguments(DeviceArguments):
    """Method and number of the drafts."""

    speculative_config: Mapping[str, Any] | None = argument(
        None,
        room="engine.drafting",
        description=(
            'Guess next tokens and compute several at a time, which changes no answer: `{"method": "ngram"}` '
            'copies what the text had before, `{"method": "suffix"}` also what finished outputs had; "mtp", '
            '"eagle3" and "draft_model" draft with layers. None: "ngram" on one CPU device with native kernels, '
            'if the model has no recurrent layers; else nothing. `{"num_speculative_tokens": 0}`: nothing. See '
            "[speculative decoding](speculative-decoding.md)."
        ),
        documented_default="`ngram` on one CPU device",
        metavar="JSON",
        help='Guess tokens ahead, such as \'{"method": "ngram"}\', the default on CPU; answers stay. '
        "Off: '{\"num_speculative_tokens\": 0}'.",
        speed_only=True,
    )

    def check(self) -> None:
        speculative = self.parsed_speculative_config
        size = None if speculative is None else speculative.draft_tensor_parallel_size
        if size not in (None, self.tensor_parallel_size):
            raise ConfigError(
                f"speculative_config: draft_tensor_parallel_size={size!r} must be the model's, "
                f"{self.tensor_parallel_size}, whose devices also draft: leave it out"
            )

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        speculative = self.parsed_speculative_config
        method = None if speculative is None else speculative.method
        return {EngineFeature.LAYER_DRAFTS: (method in LAYER_METHODS, f"speculative_config with method={method!r}")}

    @functools.cached_property
    def parsed_speculative_config(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`."""
        return parse_speculative_config(self.speculative_config)
