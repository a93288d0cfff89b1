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
    from jaxis.models.common.towers.tower import VisionTower


class TextPart(CausalLM):
    """A text model that is one part of a multimodal checkpoint; the other parts are not loaded with it.

    A family inherits this class and then its text model. The text model's config is `text_config` or, if a family's
    first checkpoints have no such key, all of config.json. The class names the parts left out; any other tensor or
    config key is an error. Checkpoints name the text model in one of two ways: `language_model.model.*` with
    `language_model.lm_head` here, the other in `InnerTextPart`.

    Attributes:
      text_renames: Names of the text model's two parts in the checkpoint; the text model's own table applies after.
      text_module_renames: Names of the two parts in transformers.
      text_model_types: Accepted values of `model_type` in the text's config.
      other_parts: Modules and tensors of the checkpoint that are not loaded.
      other_keys: Keys of config.json, besides `vision_config`, that concern those modules.
      is_tied_outside: True if the reference ties the head when config.json does not say so outside of `text_config`.
      tower: Image encoder among those modules, which an engine loads beside the text; None: prompts are text only.
    """

    text_renames: ClassVar[Sequence[Rename]] = (
        ("language_model.model", "model"),
        ("language_model.lm_head", "lm_head"),
    )
    text_module_renames: ClassVar[Sequence[Rename]] = (("model.language_model", "model"),)
    # transformers' name of the text model, in adapters trained with it and in files that ModelOpt quantized.
    other_names = (("model.language_model", "model"),)
    is_tied_outside: ClassVar[bool] = False
    tower: ClassVar[type[VisionTower] | None] = None
    text_model_types: ClassVar[tuple[str, ...]]
    other_parts: ClassVar[tuple[str, ...]] = ("model.visual",)
    other_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        text_config = config.get_text_config()
        model_type = text_config.get("model_type")
        if model_type is not None and model_type not in self.text_model_types:
            raise ConfigError(
                f"the text's config in {config.source} has model_type={model_type!r}, expected "
                f"{' or '.join(map(repr, self.text_model_types))}, the text of {type(self).__name__}: correct the file"
            )
        config.ignore("vision_config", *self.other_keys, because="it is about a part that is not loaded")
        self._outside: bool | None = config.get("tie_word_embeddings")
        model_config = dataclasses.replace(vllm_config.model_config, hf_config=text_config)
        super().__init__(dataclasses.replace(vllm_config, model_config=model_config), rng, quant_config)

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        return *cls.text_renames, *cls.inner_renames(config)

    @classmethod
    def all_module_renames(cls, config: HFConfig) -> Sequence[Rename] | None:
        own = super().all_module_renames(config)
        return *cls.text_module_renames, *(cls.inner_renames(config) if own is None else own)

    @classmethod
    def inner_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Returns the text model's own table, which applies after `text_renames`."""
        return super().all_renames(config)

    def is_tied(self, config: HFConfig, default: bool) -> bool:
        """True if config.json or its `text_config` says so: for some of these families, the reference takes either.

        If two values differ and the reference takes the other one, the checkpoint has both tables, or the reference has
        no head.
        """
        outside = self._outside
        return super().is_tied(config, default if outside is None else outside) or bool(outside)

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Also drops tensors of `other_parts`, which a checkpoint may have inside or outside of `model`."""
        prefixes = tuple(f"{part.removeprefix('model.')}." for part in self.other_parts)
        return super().without_redundant_tensors(
            (name, tensor) for name, tensor in weights if not f"{name.removeprefix('model.')}.".startswith(prefixes)
        )


class InnerTextPart(TextPart):
    """A `TextPart` whose decoder lies in the checkpoint's `model`, beside the other parts; the head lies outside."""

    text_renames: ClassVar[Sequence[Rename]] = (("model.language_model", "model"),)
