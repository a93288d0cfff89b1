"""The text part of multimodal checkpoints, served alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import Rename
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.config.quantization import QuantizationConfig
    from jaxis.models.common.vision_tower import VisionTower


class TextPart(CausalLM):
    """A text model that is one part of a checkpoint: the other parts are not loaded with it.

    A family inherits this class and then its text model, whose config is `text_config` or, where a family's first
    checkpoints have none, all of config.json. It names the parts left out; any other tensor or config key is an error,
    as usual. Checkpoints name the text model in one of two ways. Here is the one of `language_model.model.*` with
    `language_model.lm_head`; `InnerTextPart` is the other.

    Attributes:
      text_renames: What the checkpoint calls the text model's two parts; its own table comes after.
      text_module_renames: What transformers calls them.
      text_model_types: The `model_type` that the text's config may have.
      other_parts: The checkpoint's modules and tensors that are not loaded.
      other_keys: Keys of config.json that concern those modules.
      is_tied_outside: Whether the reference ties the head if config.json does not say so outside of `text_config`.
      tower: What of those modules encodes images, which an engine loads beside the text; None: prompts are text only.
    """

    text_renames: ClassVar[Sequence[Rename]] = (
        ("language_model.model", "model"),
        ("language_model.lm_head", "lm_head"),
    )
    text_module_renames: ClassVar[Sequence[Rename]] = (("model.language_model", "model"),)
    # transformers' name of the text model: of adapters that were trained with it, and of files that ModelOpt quantized.
    other_names = (("model.language_model", "model"),)
    is_tied_outside: ClassVar[bool] = False
    tower: ClassVar[type[VisionTower] | None] = None
    text_model_types: ClassVar[tuple[str, ...]]
    other_parts: ClassVar[tuple[str, ...]]
    other_keys: ClassVar[tuple[str, ...]]

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        text_config = config.get_text_config()
        model_type = text_config.get("model_type")
        if model_type is not None and model_type not in self.text_model_types:
            raise ConfigError(
                f"the text's config in {config.source} has model_type={model_type!r}, expected "
                f"{' or '.join(map(repr, self.text_model_types))}, the text of {type(self).__name__}: correct the file"
            )
        for key in self.other_keys:
            config.ignore(key, because="it is about a part that is not loaded")
        self._outside: bool | None = config.get("tie_word_embeddings")
        model_config = dataclasses.replace(vllm_config.model_config, hf_config=text_config)
        super().__init__(dataclasses.replace(vllm_config, model_config=model_config), rng, quant_config)

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """See `CausalLM`."""
        return *cls.text_renames, *cls.inner_renames(config)

    @classmethod
    def all_module_renames(cls, config: HFConfig) -> Sequence[Rename] | None:
        """See `CausalLM`."""
        own = super().all_module_renames(config)
        return *cls.text_module_renames, *(cls.inner_renames(config) if own is None else own)

    @classmethod
    def inner_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """The text model's own table, after its two parts have the names that they have here."""
        return super().all_renames(config)

    def is_tied(self, config: HFConfig, default: bool) -> bool:
        """Whether config.json or its `text_config` says so: the reference takes either for some of these families.

        Where it takes the other one of two that differ, the checkpoint has both tables, or the reference has no head.
        """
        outside = self._outside
        return super().is_tied(config, default if outside is None else outside) or bool(outside)

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """See `CausalLM`; tensors of `other_parts` are dropped as well."""
        prefixes = tuple(f"{part}." for part in self.other_parts)
        return super().without_redundant_tensors(
            (name, tensor) for name, tensor in weights if not f"{name}.".startswith(prefixes)
        )


class InnerTextPart(TextPart):
    """A `TextPart` whose decoder is in the checkpoint's `model`, beside the other parts, and whose head is outside."""

    text_renames: ClassVar[Sequence[Rename]] = (("model.language_model", "model"),)
