"""Tunix trains, and an engine of jaxis answers: a rollout worker for Tunix's `RLCluster`."""

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
from jaxis.loading.open_checkpoint import read_tensor_infos

_LARGEST_SEED = 2**31 - 1


class JaxisRollout(BaseRollout):
    """Tunix's `BaseRollout`: samples with an engine, whose weights follow the trainer's.

    Give it to Tunix as `ClusterConfig(rollout_engine=functools.partial(JaxisRollout, folder=FOLDER), ...)`.

    Args:
      rollout_actor: Tunix's model, with the first weights.
      tokenizer: Tunix's.
      mesh: Tunix's; the engine has its own.
      rollout_config: Tunix's, which comes with each call as well.
      folder: Of the checkpoint that the model is from: its config.json and the names of its tensors. None: that of the
        embedded model.
      **arguments: Of `LLM`.

    Raises:
      ConfigError: A model that Tunix has no names of tensors for.
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
          Answers as texts and tokens, the end-of-sequence token included, and prompts padded on the left; if asked for,
          also the log-probabilities that the tokens were drawn with. No logits.
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
        """Log-probabilities of completions by the weights of the moment.

        Args:
          prompt_tokens: [B, P], padded on the left.
          completion_tokens: [B, C], padded on the right.

        Returns:
          float32 [B, C]; 0 of padding.
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
        """Gives the engine the trainer's weights.

        Args:
          params: Of Tunix's model.
          filter_types: Which they are: all, but those of LoRA.

        Raises:
          ConfigError: They are LoRA's.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ConfigError("JaxisRollout takes whole weights from Tunix, not LoRA's: train all weights")
        # Tunix forbids copies while it hands on weights; those that are packed have to be copied.
        with jax.transfer_guard("allow"):
            self._llm.update_weights(self._names.tensors_of(params))

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the weights are shared with no model of Tunix's, so that it hands them on."""

    def close(self) -> None:
        """Gives the engine's memory back."""
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
    """From the parameters of a model of Tunix's to the tensors of the checkpoint that it is from.

    Tunix says which parameter a tensor becomes, and how it is turned and cut; this goes the other way.

    Args:
      model: Tunix's.
      folder: The checkpoint.

    Raises:
      ConfigError: Tunix does not say it of this model.
    """

    def __init__(self, model: Any, folder: str | Path) -> None:
        self._infos = read_tensor_infos(folder)
        self._rules = _rules_of(model)

    def tensors_of(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor and its name.

        Args:
          params: A state of the model's, or a dict.

        Raises:
          ConfigError: A tensor is in no parameter.
        """
        values = dict(_by_name(nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params))
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


def _by_name(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _by_name(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _logprobs(entries: Sequence[Mapping[int, Any]], token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray([entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)], np.float32)


def _without(ids: Sequence[int], pad: int, *, left: bool) -> list[int]:
    kept = [place for place, token in enumerate(ids) if token != pad]
    if not kept:
        return []
    return list(ids[kept[0] :] if left else ids[: kept[-1] + 1])


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
