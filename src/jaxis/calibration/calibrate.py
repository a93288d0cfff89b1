"""Calibrated quantization of a model's linear layers on text, one decoder layer at a time.

Rounding compensates errors (GPTQ, arXiv:2210.17323): later columns take back the error that rounding a column causes in
the products, as far as their inputs are correlated. The inputs of each layer come from the quantized layers before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.calibration.calibrated_weight import InputStatistics, quantize_calibrated
from jaxis.calibration.decoder_run import DecoderRun
from jaxis.calibration.expert_quantization import quantize_experts
from jaxis.calibration.layer_inputs import LayerArguments, collect_inputs
from jaxis.calibration.module_schemes import weight_schemes
from jaxis.calibration.sequences import cut_sequences
from jaxis.calibration.text import read_documents
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.checkpoint_values import checkpoint_dtype
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme, dequantize, quantize
from jaxis.layers.checkpoint_names import CheckpointNames, checkpoint_names_of
from jaxis.layers.experts import PROJECTION_NAMES, JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.models.common.decoder import DecoderModel
from jaxis.models.model_loader import load_model
from jaxis.models.tied_tables import config_as_stored
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.tokenizer import Tokenizer

NUM_TOKENS = 16384

CalibratedWeights = dict[str, QuantizedWeight | CodedWeight]
"""Quantized weights by module name in the checkpoint. An expert's is `model.layers.0.mlp.experts.3.up_proj`."""


def calibrate(
    source: Path,
    text: Path,
    rules: RuleQuantizationConfig,
    *,
    num_tokens: int = NUM_TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> CalibratedWeights:
    """Quantizes the modules in a model's decoder layers for their inputs on calibration text.

    Memory holds the model in its checkpoint's type, one decoder layer in float32 with its inputs' second moments, the
    hidden states (and other layer inputs) of all tokens in float32, and the quantized weights so far.

    At most `num_tokens` of the text are used. `on_progress` gets (layers done, layers in all).

    Raises:
      RequestError: The text cannot be used, or is too short.
      ConfigError: The model's decoder layers cannot be run one by one.
      CheckpointError: The source cannot be read.
    """
    tokenizer = Tokenizer.from_path(source)
    documents = read_documents(text, tokenizer)
    sequences = cut_sequences(documents, None if tokenizer is None else tokenizer.bos_token_id, num_tokens)
    schemes = weight_schemes(source, rules)
    model = load_model(_unquantized(source), make_mesh())
    prefix, decoder = _decoder_of(model)
    found: CalibratedWeights = {}
    outside = {name.removeprefix(prefix): scheme for name, scheme in schemes.items() if name.startswith(prefix)}
    run = DecoderRun(decoder, outside, sequences)
    for number, layer in enumerate(decoder.layers):
        calibrator = _LayerCalibrator(layer, f"{prefix}layers.{number}", checkpoint_names_of(model), schemes, found)
        arguments = run.arguments(number)
        calibrator.quantize(arguments)
        if number + 1 < len(decoder.layers):
            run.advance(number, arguments)
        _release(layer)
        if on_progress is not None:
            on_progress(number + 1, len(decoder.layers))
    return found


class _LayerCalibrator:
    """Quantizes the modules of one decoder layer, and gives them the resulting weights; `found` collects these."""

    def __init__(
        self,
        layer: JaxModule,
        name: str,
        names: CheckpointNames,
        schemes: dict[str, WeightScheme],
        found: CalibratedWeights,
    ) -> None:
        self._layer = layer
        self._name = name
        self._names = names
        self._schemes = schemes
        self._found = found

    def quantize(self, arguments: Sequence[LayerArguments]) -> None:
        """Quantizes all modules, given the layer's arguments for each sequence."""
        for _, parameter in self._layer.named_parameters():
            parameter.set_value(parameter.get_value().astype(jnp.float32))
        inputs = collect_inputs(self._layer, arguments)
        modules = dict(named_modules(self._layer))
        num_tokens = sum(len(x) for _, x, *_ in arguments)
        for names, moments in inputs.moments.items():
            if any(self._scheme(name) for name in names):
                statistics = InputStatistics.of(moments / num_tokens)
                for name in names:
                    self._quantize_linear(name, modules[name], statistics)
        for name, calls in inputs.routed.items():
            self._quantize_experts(name, modules[name], calls)

    def _quantize_linear(self, name: str, linear: nnx.Module, statistics: InputStatistics) -> None:
        if (scheme := self._scheme(name)) is not None and isinstance(linear, JaxLinear):
            weight = np.asarray(linear.weight.get_value())
            linear.weight.set_value(jnp.asarray(self._round([name], weight, scheme, statistics)))

    def _quantize_experts(self, name: str, experts: nnx.Module, calls: list[tuple[np.ndarray, ...]]) -> None:
        if (scheme := self._scheme(name)) is None or not isinstance(experts, JaxExperts):
            return

        def quantize_one(stack: str, expert: int, weight: np.ndarray, statistics: InputStatistics | None) -> np.ndarray:
            # Families name the projections of an expert differently in their files.
            names = [f"{name}.{expert}.{projection}" for projection in PROJECTION_NAMES[stack]]
            return self._round(names, weight, scheme, statistics)

        quantize_experts(experts, calls, quantize_one)

    def _scheme(self, name: str) -> WeightScheme | None:
        return self._schemes.get(f"{self._name}.{name}")

    def _round(
        self, names: Sequence[str], weight: np.ndarray, scheme: WeightScheme, statistics: InputStatistics | None
    ) -> np.ndarray:
        """Quantizes the weight of these names; returns its dequantized value, float32 [out, in]."""
        full_names = [self._names.name_in_checkpoint(f"{self._name}.{name}") for name in names]
        try:
            if statistics is None:
                quantized = quantize(weight, scheme)
            else:
                quantized = quantize_calibrated(weight, scheme, statistics)
        except ValueError as error:
            raise CheckpointError(f"the weight of {full_names[0]} {error}") from None
        self._found.update(dict.fromkeys(full_names, quantized))
        return np.asarray(dequantize(quantized))


def _unquantized(source: Path) -> VllmConfig:
    hf_config = config_as_stored(source)
    return VllmConfig(ModelConfig(str(source), hf_config, dtype=jnp.dtype(checkpoint_dtype(hf_config) or "float32")))


def _decoder_of(model: JaxModule) -> tuple[str, DecoderModel]:
    for name, module in named_modules(model):
        if isinstance(module, DecoderModel) and not module.is_looped:
            return f"{name}.", module
    raise ConfigError(f"{type(model).__name__} has no DecoderModel whose layers calibration could run once, one by one")


def _release(layer: JaxModule) -> None:
    for _, parameter in layer.named_parameters():
        parameter.set_value(jnp.zeros(()))
