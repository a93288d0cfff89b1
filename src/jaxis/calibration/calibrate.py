"""Quantizes a model's linear layers for the inputs that they have on calibration text, one decoder layer at a time.

Rounding compensates errors (GPTQ, arXiv:2210.17323): what the rounding of one column changes in the products is taken
back by the columns after it, as far as their inputs are correlated. Each layer's inputs are those that the quantized
layers before it compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.calibration.calibrated_weight import InputStatistics, quantize_calibrated
from jaxis.calibration.decoder_run import DecoderRun, LayerArguments, collect_inputs
from jaxis.calibration.sensitivity import weight_schemes
from jaxis.calibration.text import read_documents
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.checkpoint_values import checkpoint_dtype
from jaxis.errors import CheckpointError, ConfigError, RequestError
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

# Token sequences of one length to calibrate on.


SEQUENCE_TOKENS = 512
MIN_SEQUENCES = 4


def cut_sequences(documents: Iterable[Sequence[int]], bos: int | None, num_tokens: int) -> list[np.ndarray]:
    """Cuts documents, joined, into sequences, and takes some that are evenly spread.

    Args:
      documents: The token ids of each.
      bos: The token with which every sequence begins, if documents begin with it.
      num_tokens: How many tokens the sequences have at most.

    Returns:
      int32 [SEQUENCE_TOKENS] each.

    Raises:
      RequestError: There are fewer than MIN_SEQUENCES.
    """
    tokens = [token for document in documents for token in document]
    opening = [bos] if bos is not None and tokens[:1] == [bos] else []
    fresh = SEQUENCE_TOKENS - len(opening)
    num_available = len(tokens) // fresh
    if num_available < MIN_SEQUENCES:
        raise RequestError(
            f"the text to calibrate on has {len(tokens)} tokens; it needs {MIN_SEQUENCES * SEQUENCE_TOKENS} or more"
        )
    count = min(num_available, max(MIN_SEQUENCES, num_tokens // SEQUENCE_TOKENS))
    chosen = np.linspace(0, num_available - 1, count).round().astype(int)
    pieces = (tokens[number * fresh : (number + 1) * fresh] for number in chosen)
    return [np.asarray([*opening, *piece], np.int32) for piece in pieces]


# Quantizes the experts of a mixture, each for the tokens that go to it.


_MIN_TOKENS = 64
"""If fewer tokens go to an expert, it is quantized without them."""

QuantizeExpert = Callable[[str, int, np.ndarray, InputStatistics | None], np.ndarray]
"""(stack, expert, weight [out, in], its input or None) -> the weight quantized and dequantized, float32 [out, in]."""


def quantize_experts(experts: JaxExperts, calls: Sequence[tuple[np.ndarray, ...]], quantize: QuantizeExpert) -> None:
    """Quantizes one expert after the other, and gives the module the weights that result.

    An expert's down projection is quantized for what its quantized gate and up projections compute. A token counts by
    the square of its weight for the expert, as its errors do in the output.

    Args:
      experts: The module, with float32 stacks.
      calls: Its arguments for each sequence: x [T, E], expert ids [T, k], expert weights [T, k].
      quantize: Quantizes one weight.
    """
    x, expert_ids, expert_weights = (np.concatenate(arrays) for arrays in zip(*calls, strict=True))
    stacks = {name: np.array(getattr(experts, name).get_value(), np.float32) for name in experts.stack_names}
    for expert in range(experts.num_experts):
        tokens, place = np.nonzero(expert_ids == expert)
        shares = expert_weights[tokens, place][:, None]
        rows, shares = (x[tokens] * shares, np.ones_like(shares)) if experts.scales_input else (x[tokens], shares)
        is_known = len(tokens) >= _MIN_TOKENS
        statistics = _statistics(rows * shares) if is_known else None
        inner = [name for name in experts.stack_names if name != "down_proj"]
        for name in inner:
            stacks[name][expert] = quantize(name, expert, stacks[name][expert], statistics)
        if is_known:
            products = {
                name: jnp.asarray(_projected(experts, name, expert, rows, stacks[name][expert])) for name in inner
            }
            hidden = np.asarray(experts.gated_unit(products.get("gate_proj"), products["up_proj"]))
            statistics = _statistics(hidden * shares)
        stacks["down_proj"][expert] = quantize("down_proj", expert, stacks["down_proj"][expert], statistics)
    for name, stack in stacks.items():
        getattr(experts, name).set_value(jnp.asarray(stack))


def _statistics(rows: np.ndarray) -> InputStatistics:
    return InputStatistics.of(rows.T @ rows / len(rows))


def _projected(experts: JaxExperts, name: str, expert: int, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """rows [T, in] -> [T, out] of one expert's projection."""
    bias = getattr(experts, f"{name}_bias")
    return rows @ weight.T + (0 if bias is None else np.asarray(bias[...][expert], np.float32))


NUM_TOKENS = 16384

CalibratedWeights = dict[str, QuantizedWeight | CodedWeight]
"""A module's name in the checkpoint -> its quantized weight; an expert's is `model.layers.0.mlp.experts.3.up_proj`."""


def calibrate(
    source: Path,
    text: Path,
    rules: RuleQuantizationConfig,
    *,
    num_tokens: int = NUM_TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> CalibratedWeights:
    """Quantizes the modules in a model's decoder layers for the inputs that they have on calibration text.

    In memory are the model in its checkpoint's type, one decoder layer in float32 with its inputs' second moments, the
    hidden states of all tokens in float32 with whatever else layers take, and the quantized weights so far.

    Args:
      source: An unquantized checkpoint in Hugging Face format.
      text: See `read_documents`.
      rules: The types of each module.
      num_tokens: How many tokens of the text to use at most.
      on_progress: Called with (layers done, layers in all).

    Raises:
      RequestError: The text cannot be used, or is too short.
      ConfigError: The model has no decoder layers that can be run one by one.
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
    """Quantizes the modules of one decoder layer, and gives them the weights that result.

    Args:
      layer: The layer.
      name: Its dotted name in the model.
      names: What the checkpoint calls modules.
      schemes: Of the model's modules.
      found: What to add the quantized weights to.
    """

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
        """Quantizes all modules for what the layer is called with for each sequence."""
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
        """Quantizes a weight that has these names, and returns what it stands for then, float32 [out, in]."""
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
    """The decoder in a model, and what the names of its modules begin with."""
    for name, module in named_modules(model):
        if isinstance(module, DecoderModel):
            return f"{name}.", module
    raise ConfigError(f"{type(model).__name__} has no DecoderModel, whose layers calibration could run one by one")


def _release(layer: JaxModule) -> None:
    """Frees a layer's weights."""
    for _, parameter in layer.named_parameters():
        parameter.set_value(jnp.zeros(()))
