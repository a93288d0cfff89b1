"""Rollout worker for Tunix's `RLCluster`: Tunix trains, and an engine of jaxis answers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxis import LLM, SamplingParams
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError
from jaxis.host.dotted_names import by_dotted_name
from jaxis.loading.open_checkpoint import read_tensor_infos

_LARGEST_SEED = 2**31 - 1


class JaxisRollout(BaseRollout):
    """Tunix's `BaseRollout`: samples with an engine whose weights follow the trainer's.

    Give it to Tunix as `ClusterConfig(rollout_engine=functools.partial(JaxisRollout, folder=FOLDER), ...)`.

    Args:
      rollout_actor: Tunix's model, with the first weights.
      tokenizer: Tunix's tokenizer.
      mesh: Tunix's mesh; not used, since the engine has its own.
      rollout_config: Tunix's configuration; not used, since each call has one.
      folder: Folder of the model's checkpoint, for config.json and the names of tensors. None: the embedded model.
      **arguments: Arguments of `LLM`.

    Raises:
      ConfigError: Tunix has no tensor names for the model.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        folder: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        del mesh, rollout_config
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._names = TunixTensors(rollout_actor, folder or EMBEDDED_MODEL)
        weights = self._names.tensors_of(nnx.state(rollout_actor, nnx.Param))
        self._llm = LLM.from_params(None if folder is None else str(folder), weights, show_progress=False, **arguments)

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Answers prompts.

        Returns:
          Answers as texts and tokens, including the end-of-sequence token, and prompts padded on the left; if asked
          for, also the log-probabilities with which the tokens were sampled. No logits.
        """
        config, pad = rollout_config, self.pad_id()
        ids = [self._encode(prompt)[-config.max_prompt_length :] for prompt in prompts]
        params = [self._sampling(config, number) for number in range(len(ids))]
        outputs = [output.outputs[0] for output in self._llm.generate(ids, params, progress=False)]
        padded = [[pad] * (config.max_prompt_length - len(each)) + each for each in ids]
        return RolloutOutput(
            text=[self._tokenizer.decode(output.token_ids) for output in outputs],
            logits=[],
            tokens=[np.asarray(output.token_ids, np.int32) for output in outputs],
            left_padded_prompt_tokens=np.asarray(padded, np.int32),
            logprobs=[_logprobs(output.logprobs or [], output.token_ids) for output in outputs]
            if config.return_logprobs
            else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Computes log-probabilities of completions with the current weights.

        Args:
          prompt_tokens: [B, P], padded on the left.
          completion_tokens: [B, C], padded on the right.

        Returns:
          float32 [B, C]; 0 for padding.
        """
        pad, found = self.pad_id(), np.zeros(completion_tokens.shape, np.float32)
        rows = zip(np.asarray(prompt_tokens).tolist(), np.asarray(completion_tokens).tolist(), strict=True)
        stripped = [(_without(prompt, pad, left=True), _without(answer, pad, left=False)) for prompt, answer in rows]
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        outputs = self._llm.generate([prompt + answer for prompt, answer in stripped], params, progress=False)
        for row, ((prompt, answer), output) in enumerate(zip(stripped, outputs, strict=True)):
            scored = (output.prompt_logprobs or [])[len(prompt) :]
            found[row, : len(answer)] = _logprobs([each or {} for each in scored], answer)
        return jax.numpy.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Updates the engine's weights from the trainer's.

        Args:
          params: Parameters of Tunix's model.
          filter_types: Types of the parameters; None or any types but LoRA's mean all parameters.

        Raises:
          ConfigError: The parameters are LoRA's.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ConfigError("JaxisRollout takes whole weights from Tunix, not LoRA's: train all weights")
        # Tunix forbids copies during this call, but packed weights have to be copied.
        with jax.transfer_guard("allow"):
            self._llm.update_weights(self._names.tensors_of(params))

    def pad_id(self) -> int:
        """Returns the tokenizer's padding id."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's end-of-sequence id."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: the engine shares weights with no model of Tunix's, so Tunix sends updates."""

    def close(self) -> None:
        """Frees the engine's memory."""
        self._llm.close()

    def _encode(self, prompt: str) -> list[int]:
        bos = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids(([bos] if bos else []) + list(self._tokenizer.encode(prompt)))

    def _sampling(self, config: RolloutConfig, number: int) -> SamplingParams:
        seed = None
        if config.seed is not None:
            words = np.asarray(jax.random.key_data(config.seed) if _is_key(config.seed) else config.seed).reshape(-1)
            seed = int(np.random.RandomState([*words.astype(np.uint32).tolist(), number]).randint(_LARGEST_SEED))
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            seed=seed,
            stop_token_ids=list(config.eos_tokens or ()),
            logprobs=0 if config.return_logprobs else None,
            logprobs_mode="processed_logprobs",
        )


class TunixTensors:
    """Converts the parameters of a Tunix model to the tensors of its checkpoint.

    Tunix defines which parameter a tensor becomes, and how it is transposed and reshaped. This class inverts that.

    Args:
      model: The Tunix model.
      folder: Folder of the checkpoint.

    Raises:
      ConfigError: Tunix defines no such mapping for the model.
    """

    def __init__(self, model: Any, folder: str | Path) -> None:
        self._infos = read_tensor_infos(folder)
        self._rules = _rules_of(model)

    def tensors_of(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and value of each tensor.

        Args:
          params: State of the model, or a dict.

        Raises:
          ConfigError: A tensor is not in any parameter.
        """
        values = dict(by_dotted_name(nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params))
        for name, info in self._infos.items():
            found = [(re.sub(rule, to, name), how) for rule, (to, how) in self._rules.items() if re.match(rule, name)]
            if len(found) != 1 or (key := found[0][0]) not in values:
                raise ConfigError(f"Tunix's model has no parameter of its own for the tensor {name!r}")
            order = (found[0][1] or (None, None))[0] or range(len(info.shape))
            turned = np.asarray(values[key]).reshape([info.shape[axis] for axis in order])
            yield name, np.ascontiguousarray(turned.transpose(np.argsort(order)))


def _rules_of(model: Any) -> Mapping[str, tuple[str, Any]]:
    package = type(model).__module__.rpartition(".")[0]
    for module in ("params", "params_safetensors"):
        try:
            found = importlib.import_module(f"{package}.{module}")
        except ImportError:
            continue
        if (rules := getattr(found, "_get_key_and_transform_mapping", None)) is not None:
            return rules(model.config)
    raise ConfigError(f"Tunix does not say which tensors {type(model).__name__} is made of")


def _logprobs(entries: Sequence[Mapping[int, Any]], token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray([entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)], np.float32)


def _without(ids: Sequence[int], pad: int, *, left: bool) -> list[int]:
    kept = [place for place, token in enumerate(ids) if token != pad]
    if not kept:
        return []
    return list(ids[kept[0] :] if left else ids[: kept[-1] + 1])


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
