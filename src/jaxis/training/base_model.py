from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxis.compilation.abstract_model import abstract_model
from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.checkpoint_values import DEFAULT_CONTEXT_LENGTH, checkpoint_dtype, trained_context_length
from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig
from jaxis.config.value_checks import check_values
from jaxis.engine.engine_config import DTYPES
from jaxis.engine.model_params import to_llm_arguments
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.loading.hub import resolve_model
from jaxis.loading.open_checkpoint import TensorListing, open_checkpoint, read_config_values
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.models.tied_tables import tables_of
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.wrappers import PackingConfig
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import reserved_variable
from jaxis.tokenizer.template_choice import read_tokenizer
from jaxis.training.config import ROUTER_KEYS, TrainConfig
from jaxis.training.sharding import Devices, devices_of


@dataclass(frozen=True)
class BaseModel:
    """The checkpoint that a run starts from, whose configuration has been read, but not its weights.

    Attributes:
      path: Its folder or file.
      name: The user's name for it.
      tokenizer: Tokenizer, with the chat template of the run.
      template: Arguments of `Tokenizer.apply_chat_template`.
      context: Length of the longest sequence in tokens.
      compute_dtype: Data type of the forward pass.
      quantization: Quantization beyond the checkpoint's own: int8, int4 or None.
    """

    path: Path
    name: str
    hf_config: HFConfig
    tokenizer: Tokenizer
    template: Mapping[str, Any]
    context: int
    compute_dtype: DTypeLike
    quantization: str | None
    devices: Devices = field(default_factory=Devices)

    def load(
        self, dtype: DTypeLike, progress: ProgressDisplay, *, random: bool = False, seed: int = 0, packed: bool = False
    ) -> JaxModule:
        """Loads the model. Raises the errors of `load_model`, ConfigError and CheckpointError.

        Args:
          dtype: Data type of plain float weights and of the forward pass.
          progress: Display of progress.
          random: True for random weights instead of the checkpoint's.
          seed: Seed of random weights.
          packed: True to pack weights for the native kernels, as the engine does.
        """
        quantization = None if random else self._quantization()
        config = VllmConfig(
            ModelConfig(str(self.path), self.hf_config, dtype=dtype, max_model_len=self.context, seed=seed),
            load_config=LoadConfig(load_format="dummy" if random else "auto"),
            quant_config=PackingConfig(quantization) if packed else quantization,
        )
        with progress.loading(self.name) as on_progress:
            return load_model(config, make_mesh(), on_progress)

    def construct(self, dtype: DTypeLike, *, packed: bool = False) -> JaxModule:
        """Constructs the model without weights, for floats of this type or for packed weights."""
        config = ModelConfig(str(self.path), self.hf_config, dtype=dtype, max_model_len=self.context)
        quantization = PackingConfig(self._quantization()) if packed else None
        return construct_abstractly(VllmConfig(config, quant_config=quantization), check_config=False)

    def abstract(self, dtype: DTypeLike) -> JaxModule:
        """Returns the model that `load` reads, with shapes instead of arrays."""
        config = ModelConfig(str(self.path), self.hf_config, dtype=dtype, max_model_len=self.context)
        return abstract_model(VllmConfig(config, quant_config=self._quantization()), make_mesh())

    def module_names(self) -> set[str]:
        """Returns the checkpoint's names of the modules that have tensors."""
        with open_checkpoint(self.path) as checkpoint:
            return {name.rpartition(".")[0] for name in checkpoint.names()}

    def check_ids(self, ids: npt.ArrayLike, where: str) -> None:
        """Raises ConfigError if a token id of the data row at `where` is too large for the model's vocabulary."""
        size = self.hf_config.get_text_config().get("vocab_size")
        if size is not None and (largest := int(np.max(ids, initial=0))) >= size:
            text = self.tokenizer.decode([largest], skip_special_tokens=False)
            raise ConfigError(
                f"{where}: has token {largest}, {text!r}, of the tokenizer of {self.path}, whose model has a "
                f"vocabulary of {size}: put the model's own tokenizer there, or leave the token out of the row and the "
                "chat template"
            )

    def _quantization(self) -> QuantizationConfig | None:
        choice = parse_quantization(self.quantization)
        return quantization_of_checkpoint(self.hf_config, choice, TensorListing(self.path))


def open_base_model(config: TrainConfig, platform: str | None = None) -> BaseModel:
    """Finds the model and reads all files except its weights; `platform` decides the default data type.

    Raises ConfigError or CheckpointError if the model cannot be found, or its kind cannot be trained.
    """
    params = config.model
    kept = {name: value for name, value in params.model_kwargs.items() if name not in ROUTER_KEYS}
    arguments = to_llm_arguments(dataclasses.replace(params, model_kwargs=kept))
    path = (
        EMBEDDED_MODEL
        if params.model_name is None
        else resolve_model(params.model_name, revision=params.model_revision)
    )
    values = read_config_values(path)
    hf_config = tables_of(
        HFConfig(values.values, source=values.source), path, has_weights=params.load_pretrained_weights
    ).config
    check_values(hf_config)
    tokenizer = read_tokenizer(path, params.chat_template)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer: put the files of its tokenizer there")
    template = dict(params.chat_template_kwargs or {})
    if (reserved := reserved_variable(template, tokenizer)) is not None:
        raise ConfigError(f"model.chat_template_kwargs must not set {reserved!r}: leave it out")
    trained = trained_context_length(hf_config) or DEFAULT_CONTEXT_LENGTH
    if params.model_max_length is not None and params.model_max_length > trained:
        raise ConfigError(
            f"model.model_max_length={params.model_max_length} is more than the {trained} positions of the model: "
            "lower it"
        )
    return BaseModel(
        path,
        params.model_name or "the embedded model",
        hf_config,
        tokenizer,
        template,
        trained,
        _compute_dtype(
            config.training.compute_dtype or arguments["dtype"], hf_config, platform or jax.default_backend()
        ),
        _quantization(config, arguments.get("quantization")),
        devices_of(config.fsdp),
    )


def _quantization(config: TrainConfig, asked: str | None) -> str | None:
    return f"int{config.peft.q_lora_bits}" if config.peft.q_lora else asked


def _compute_dtype(name: str, hf_config: HFConfig, platform: str) -> DTypeLike:
    if name == "auto":
        name = "float32" if platform == "cpu" else checkpoint_dtype(hf_config) or "bfloat16"
    if name == "float16":
        raise ConfigError("model.torch_dtype_str='float16' cannot be honoured: gradients underflow; give bfloat16")
    return DTYPES[name]
