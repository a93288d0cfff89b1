"""Answers that the engine samples by the weights of the moment, as the batch of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxis.errors import ConfigError, EngineError
from jaxis.layers.module import JaxModule
from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import Moment
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import ERROR, TrainConfig
from jaxis.training.examples import Example
from jaxis.training.grpo.objective import MISMATCH, VOCAB_MISMATCH, RolloutBatch
from jaxis.training.grpo.rewards import Rewards, advantages
from jaxis.training.held_out_prompts import HeldOutPrompts
from jaxis.training.live_engine import LiveEngine
from jaxis.training.rows import DataRow

LARGEST_SEED = 2**31 - 1


class Rollouts:
    """The batches of a run, each sampled when its step comes. Given the weights, they are a function of the seed.

    Attributes:
      shown: See `BatchSource`.

    Args:
      config: The run.
      base: The model before it was trained.
      rows: Whose prompts are answered.

    Raises:
      ConfigError: A row has no prompt, or one that is too long; a reward function cannot be imported; or a step has
        no whole number of groups.
    """

    shown = ("reward", MISMATCH)

    def __init__(self, config: TrainConfig, base: BaseModel, rows: Sequence[DataRow]) -> None:
        training, grpo = config.training, config.training.grpo
        self._params, self._seed = grpo, training.data_seed
        self._shape = (training.gradient_accumulation_steps, training.per_device_train_batch_size)
        num_answers = self._shape[0] * self._shape[1]
        if num_answers % grpo.num_generations:
            raise ConfigError(
                f"a step has {num_answers} answers (per_device_train_batch_size x gradient_accumulation_steps), which "
                f"are no whole number of groups of training.grpo.num_generations={grpo.num_generations}"
            )
        self._num_prompts = num_answers // grpo.num_generations
        self._rewards = Rewards(training.reward_functions)
        context = config.model.model_max_length or base.context
        longest = context - grpo.max_completion_length
        if grpo.max_prompt_length is not None:
            longest = min(longest, grpo.max_prompt_length)
        self._prompts = HeldOutPrompts(rows, base.tokenizer, base.template, longest)
        for ids, where in zip(self._prompts.ids, self._prompts.where, strict=True):
            base.check_ids(ids, where)
        self._max_tokens = self._prompts.longest + grpo.max_completion_length
        self._base = base
        self._engine: LiveEngine | None = None
        self._fails = training.on_mismatch == ERROR
        self._mismatch: dict[str, float] = {}
        self._num_checked = 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every prompt is seen once."""
        return -(-len(self._prompts.ids) // self._num_prompts)

    def draw(self, moment: Moment) -> tuple[TrainingBatch, Mapping[str, float]]:
        """See `BatchSource`."""
        step, count = moment.step, self._params.num_generations
        if self._engine is None:
            self._engine = LiveEngine(self._base, self._max_tokens, moment.progress)
        chosen = [place for place in self._places(step) for _ in range(count)]
        ids = [self._prompts.ids[place] for place in chosen]
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=self._params.max_completion_length,
                logprobs=0,
                seed=self._seed_of(step, number),
            )
            for number in range(len(chosen))
        ]
        model = moment.model()
        answers = self._engine.answers(model, ids, params)
        rewards = self._rewards.of(self._prompts.answered(answers, chosen))
        total = np.sum(list(rewards.values()), axis=0)
        gains = advantages(total, count, scaled=self._params.scale_rewards)
        if self._params.log_completions:
            for place, answer, reward in zip(chosen, answers, total.tolist(), strict=True):
                moment.write_answer(
                    {"step": step + 1, "row": self._prompts.where[place], "answer": answer.text, "reward": reward}
                )
        lengths = [len(answer.token_ids) for answer in answers]
        measured = {
            "reward": float(total.mean()),
            "reward_std": float(total.reshape(-1, count).std(axis=1, ddof=1).mean()),
            **{f"rewards/{name}": float(each.mean()) for name, each in rewards.items()},
            "completion_length": float(np.mean(lengths)),
            "completions_cut": float(np.mean([answer.finish_reason == "length" for answer in answers])),
        }
        batch = self._batch(ids, answers, gains)
        return self._with_vocabulary(batch, step, self._engine, model), measured

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """See `BatchSource`."""
        found = {name: values[name] for name in (MISMATCH, VOCAB_MISMATCH) if name in values}
        self._num_checked += 1
        self._mismatch = {name: max(value, self._mismatch.get(name, 0.0)) for name, value in found.items()}
        largest = max(found.values())
        if self._fails and largest != 0:
            raise EngineError(
                f"step {step}: training sees log-probabilities that differ by up to {largest:.3g} from those that "
                "answers were sampled with: set training.grpo.on_mismatch to correct or ignore, or "
                "training.forward_pass to engine"
            )

    def summary(self) -> Sequence[str]:
        """See `BatchSource`."""
        if not self._num_checked:
            return ()
        said = f"{self._mismatch[MISMATCH]} of all sampled tokens"
        if VOCAB_MISMATCH in self._mismatch:
            num_positions = self._num_checked * self._shape[0] * self._params.vocab_mismatch_positions
            said += f", {self._mismatch[VOCAB_MISMATCH]} of the whole vocabulary at {num_positions} positions"
        return (
            f"largest difference of log-probabilities between sampler and trainer in {self._num_checked} steps: {said}",
        )

    def close(self) -> None:
        """Frees the engine's cache."""
        if self._engine is not None:
            self._engine.close()

    def _places(self, step: int) -> list[int]:
        """The prompts of a step: all come once before one comes again."""
        found = []
        for number in range(step * self._num_prompts, (step + 1) * self._num_prompts):
            epoch, place = divmod(number, len(self._prompts.ids))
            # NumPy guarantees the stream of this generator, whatever its version.
            found.append(int(np.random.RandomState([self._seed, epoch]).permutation(len(self._prompts.ids))[place]))
        return found

    def _seed_of(self, step: int, number: int) -> int:
        return int(np.random.RandomState([self._seed, step, number]).randint(LARGEST_SEED))

    def _batch(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[CompletionOutput], gains: np.ndarray
    ) -> RolloutBatch:
        items = []
        for ids, answer in zip(prompts, answers, strict=True):
            learned = np.arange(len(ids) + len(answer.token_ids)) >= len(ids)
            items.append((Example(np.asarray([*ids, *answer.token_ids], np.int32), learned, ""),))
        num_micro_batches, num_items = self._shape
        shape = BatchShape(num_micro_batches, num_items, self._max_tokens)
        batch = Batches(items, shape, seed=None).batch(0)
        sampled, weights = (np.zeros(batch.ids.shape, np.float32) for _ in range(2))
        for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
            row, end = divmod(number, num_items), len(ids) + len(answer.token_ids) - 1
            assert answer.logprobs is not None
            entries = zip(answer.logprobs, answer.token_ids, strict=True)
            sampled[row][len(ids) - 1 : end] = [entry[token].logprob for entry, token in entries]
            weights[row][len(ids) - 1 : end] = gains[number]
        arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        return RolloutBatch(
            **arrays,
            sampled_logprobs=sampled,
            advantages=weights,
            vocab_positions=np.zeros((num_micro_batches, 0), np.int32),
            vocab_logprobs=np.zeros((num_micro_batches, 0, 0), np.float32),
        )

    def _with_vocabulary(self, batch: RolloutBatch, step: int, engine: LiveEngine, model: JaxModule) -> RolloutBatch:
        """The batch with what the engine would sample from, at positions that are drawn for the step."""
        if not (count := self._params.vocab_mismatch_positions):
            return batch
        drawn = np.random.RandomState([self._seed, step])
        learned = np.asarray(batch.learned).reshape(len(batch.ids), -1)
        positions = np.stack([drawn.choice(np.flatnonzero(each), count) for each in learned])
        row_length = batch.ids.shape[-1]
        prompts = []
        for ids, positions_here in zip(np.asarray(batch.ids), positions, strict=True):
            for row, last in zip(*divmod(positions_here, row_length), strict=True):
                prompts.append(ids[row, : last + 1].tolist())
        params = [SamplingParams(max_tokens=1, logprobs=ALL_LOGPROBS, seed=0)] * len(prompts)
        found = []
        for answer in engine.answers(model, prompts, params):
            assert answer.logprobs is not None
            [entry] = answer.logprobs
            found.append([entry[token].logprob for token in range(len(entry))])
        logprobs = np.asarray(found, np.float32).reshape(*positions.shape, -1)
        return dataclasses.replace(batch, vocab_positions=positions.astype(np.int32), vocab_logprobs=logprobs)
