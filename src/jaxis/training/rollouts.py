"""GRPO's batches: answers that the engine samples, their rewards and advantages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxis.errors import ConfigError, EngineError
from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxis.training.answers import HeldOutPrompts, LiveEngine, answer_seed, load_scorer, scores_of
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.config.methods import ERROR
from jaxis.training.config.training import ENGINE
from jaxis.training.data import BatchSource, StepContext, read_datasets
from jaxis.training.environments import Environments, Episode
from jaxis.training.examples import Example
from jaxis.training.objectives import MISMATCH, VOCAB_MISMATCH, RolloutBatch
from jaxis.training.rows import DataRow, with_answer

ALL_TOKENS = 2**31 - 1
MIN_DEVIATION = 1e-4
_REWARDS = "training.reward_functions"
Answer = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[CompletionOutput]]
"""Function of prompts and their sampling parameters that answers them with the current weights."""


class Rollouts(BatchSource):
    """Batches whose answers the engine samples when their first step begins, which depend on weights and seed only.

    The data rows are prompts, optionally with answers, which reward functions receive as `reference`.

    Raises:
      ConfigError: A file cannot be read; a data row has no prompt, or one that is too long; a reward function cannot be
        imported; the answers of a step are not a whole number of groups; or the configuration is not supported.
    """

    shown = ("reward", MISMATCH)

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        _check(config)
        training, grpo = config.training, config.training.grpo
        rows: list[DataRow] = []
        self.digests: dict[str, str] = {}
        for found, digests in read_datasets(config, config.data.train, with_answer):
            rows += found
            self.digests |= digests
        self._params, self._seed = grpo, training.data_seed
        self._shape = (training.gradient_accumulation_steps, training.per_device_train_batch_size)
        num_answers = self._shape[0] * self._shape[1]
        if num_answers % grpo.num_generations:
            raise ConfigError(
                f"a step has {num_answers} answers (per_device_train_batch_size x gradient_accumulation_steps), which "
                f"are no whole number of groups of training.grpo.num_generations={grpo.num_generations}"
            )
        self._num_prompts = num_answers // grpo.num_generations
        self._rewards = {name: load_scorer(name, _REWARDS) for name in training.reward_functions}
        self.environments: Environments | None = None
        if grpo.environment_factory is not None:
            self.environments = Environments(
                grpo.environment_factory, base, grpo.max_tool_calling_iterations, grpo.max_completion_length
            )
            if not training.reward_functions and self.environments.rewards_as is None:
                raise ConfigError(
                    f"training.grpo.environment_factory={grpo.environment_factory!r} has no method get_reward: write "
                    "one, or give training.reward_functions"
                )
        context = config.model.model_max_length or base.context
        longest = context - grpo.max_completion_length
        if grpo.max_prompt_length is not None:
            longest = min(longest, grpo.max_prompt_length)
        tools = None if self.environments is None else self.environments.tools
        self._prompts = HeldOutPrompts(rows, base.tokenizer, base.template, longest, tools)
        for ids, where in zip(self._prompts.ids, self._prompts.where, strict=True):
            base.check_ids(ids, where)
        # The environment's text after reset makes prompts longer.
        self.num_rows = len(rows)
        self._longest = self._prompts.longest if self.environments is None else longest
        self._max_tokens = self._longest + grpo.max_completion_length
        self._distribution = grpo.distribution
        self._engine = LiveEngine(base, self._max_tokens)
        self._fails = training.on_mismatch == ERROR
        self._drawn: tuple[RolloutBatch, Mapping[str, float]] | None = None
        self._mismatch: dict[str, float] = {}
        self._num_checked = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._prompts.ids) // self._num_prompts) * self._params.num_iterations

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        number, repeated = divmod(context.step, self._params.num_iterations)
        if not repeated:
            self._drawn = self._sample(number, context)
            return self._drawn
        assert self._drawn is not None  # runs resume where answers are sampled
        batch, measured = self._drawn
        return dataclasses.replace(batch, is_first=np.zeros_like(batch.is_first)), measured

    def _sample(self, step: int, context: StepContext) -> tuple[RolloutBatch, Mapping[str, float]]:
        """Samples and rewards the answers of a batch; `step` counts batches."""
        count = self._params.num_generations
        chosen = [place for place in self._places(step) for _ in range(count)]
        answer = functools.partial(self._engine.answers, context.model(), progress=context.progress)
        episodes = self._play(step, chosen, answer)
        rewards = self._reward(episodes, chosen)
        total = np.sum(list(rewards.values()), axis=0)
        gains = advantages(total, count, str(self._params.scale_rewards))
        if self._params.log_completions:
            for place, episode, reward in zip(chosen, episodes, total.tolist(), strict=True):
                context.write_answer(
                    {"step": context.step + 1, "row": self._prompts.where[place], "answer": episode.completion}
                    | {"reward": reward}
                )
        lengths = [sum(episode.is_sampled) for episode in episodes]
        measured = {
            "reward": float(total.mean()),
            "reward_std": float(total.reshape(-1, count).std(axis=1, ddof=1).mean()),
            **{f"rewards/{name}": float(each.mean()) for name, each in rewards.items()},
            "completion_length": float(np.mean(lengths)),
            "completions_cut": float(np.mean([episode.is_cut for episode in episodes])),
            "drafts_accepted": sum(episode.num_accepted_drafts for episode in episodes) / sum(lengths),
        }
        if self.environments is not None:
            num_calls = sum(episode.num_calls for episode in episodes)
            measured["tools/call_frequency"] = num_calls / len(episodes)
            num_failed = sum(episode.num_failed for episode in episodes)
            measured["tools/failure_frequency"] = num_failed / num_calls if num_calls else 0.0
        batch = self._batch(episodes, gains)
        return self._with_vocabulary(batch, step, answer), measured

    def check(self, step: int, values: Mapping[str, float]) -> None:
        if (step - 1) % self._params.num_iterations:
            return
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
        if not self._num_checked:
            return ()
        said = f"{self._mismatch[MISMATCH]} of all sampled tokens"
        if VOCAB_MISMATCH in self._mismatch:
            num_positions = self._num_checked * self._shape[0] * self._params.vocab_mismatch_positions
            said += f", {self._mismatch[VOCAB_MISMATCH]} of the whole vocabulary at {num_positions} positions"
        found = f"largest difference of log-probabilities between sampler and trainer in {self._num_checked} batches"
        return (f"{found}: {said}",)

    def close(self) -> None:
        self._engine.close()

    def _places(self, step: int) -> list[int]:
        """Returns the indices of a step's prompts. Every prompt is used once before one is used again."""
        found = []
        for number in range(step * self._num_prompts, (step + 1) * self._num_prompts):
            epoch, place = divmod(number, len(self._prompts.ids))
            # NumPy guarantees the stream of this generator, whatever its version.
            found.append(int(np.random.RandomState([self._seed, epoch]).permutation(len(self._prompts.ids))[place]))
        return found

    def _play(self, step: int, places: Sequence[int], answer: Answer) -> list[Episode]:
        """Answers prompts; with an environment, until no answer calls a tool."""
        environments = self.environments
        if environments is None:
            episodes = [Episode(self._prompts.prompts[place], self._prompts.ids[place]) for place in places]
        else:
            episodes = [environments.begin(self._prompts, place, self._longest) for place in places]
        active, turn = list(range(len(places))), 0
        while active:
            answers = answer(
                [[*episodes[i].prompt_ids, *episodes[i].ids] for i in active],
                [
                    self._sampling(step, i, turn, self._params.max_completion_length - len(episodes[i].ids))
                    for i in active
                ],
            )
            going = []
            for i, found in zip(active, answers, strict=True):
                episodes[i].add_sampled(found)
                if environments is None:
                    episodes[i].completion = found.text
                elif environments.goes_on(episodes[i], found, turn):
                    going.append(i)
            active, turn = going, turn + 1
        return episodes

    def _sampling(self, step: int, number: int, turn: int, max_tokens: int) -> SamplingParams:
        """Returns the sampling parameters of a turn of the answer with this number."""
        words = [self._seed, step, number, *([turn] if turn else [])]
        return dataclasses.replace(
            self._distribution,
            max_tokens=max_tokens,
            logprobs=0,
            seed=answer_seed(words),
            skip_special_tokens=self.environments is None or self.environments.skip_special_tokens,
        )

    def _reward(self, episodes: Sequence[Episode], places: Sequence[int]) -> dict[str, np.ndarray]:
        completions = [episode.completion for episode in episodes]
        answered = self._prompts.answered(completions, [episode.ids for episode in episodes], places)
        environments = self.environments
        if environments is not None:
            answered["prompts"] = [episode.prompt for episode in episodes]
            answered["environments"] = [episode.environment for episode in episodes]
        rewards = {
            name.partition(":")[2]: np.asarray(scores_of(function, f"{_REWARDS} {name!r}", answered))
            for name, function in self._rewards.items()
        }
        if environments is not None and environments.rewards_as is not None:
            rewards[environments.rewards_as] = np.asarray(environments.rewards(answered))
        return rewards

    def _batch(self, episodes: Sequence[Episode], gains: np.ndarray) -> RolloutBatch:
        items = []
        for episode in episodes:
            learned = np.asarray([False] * len(episode.prompt_ids) + episode.is_sampled)
            items.append((Example(np.asarray([*episode.prompt_ids, *episode.ids], np.int32), learned, ""),))
        num_micro_batches, num_items = self._shape
        shape = BatchShape(num_micro_batches, num_items, self._max_tokens)
        batch = Batches(items, shape, seed=None).batch(0)
        sampled, weights = (np.zeros(batch.ids.shape, np.float32) for _ in range(2))
        for number, episode in enumerate(episodes):
            row = divmod(number, num_items)
            first = len(episode.prompt_ids) - 1
            sampled[row][first : first + len(episode.ids)] = episode.logprobs
            weights[row][first : first + len(episode.ids)] = gains[number]
        drawn_from = self._distribution
        return RolloutBatch(
            **batch.arrays(),
            sampled_logprobs=sampled,
            advantages=weights,
            vocab_positions=np.zeros((num_micro_batches, 0), np.int32),
            vocab_logprobs=np.zeros((num_micro_batches, 0, 0), np.float32),
            temperature=np.full(num_micro_batches, drawn_from.temperature, np.float32),
            top_k=np.full(num_micro_batches, drawn_from.top_k if drawn_from.top_k > 0 else ALL_TOKENS, np.int32),
            top_p=np.full(num_micro_batches, drawn_from.top_p, np.float32),
            min_p=np.full(num_micro_batches, drawn_from.min_p, np.float32),
            is_first=np.ones(num_micro_batches, np.float32),
        )

    def _with_vocabulary(self, batch: RolloutBatch, step: int, answer: Answer) -> RolloutBatch:
        """Adds the engine's log-probabilities of the whole vocabulary at random positions of the step."""
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
        one = dataclasses.replace(self._distribution, max_tokens=1, logprobs=ALL_LOGPROBS, seed=0)
        found = []
        for each in answer(prompts, [one] * len(prompts)):
            assert each.logprobs is not None
            [entry] = each.logprobs
            found.append([entry[token].logprob for token in range(len(entry))])
        logprobs = np.asarray(found, np.float32).reshape(*positions.shape, -1)
        return dataclasses.replace(batch, vocab_positions=positions.astype(np.int32), vocab_logprobs=logprobs)


def _check(config: TrainConfig) -> None:
    """Raises ConfigError if the configuration is not supported."""
    if config.fsdp.enable_fsdp:
        raise ConfigError("fsdp.enable_fsdp cannot be honoured with TRL_GRPO: leave it out")
    grpo = config.training.grpo
    if config.training.forward_pass != ENGINE and (grpo.has_filters or grpo.num_iterations > 1):
        needing = "top_p, top_k and min_p need" if grpo.has_filters else "num_iterations above 1 needs"
        raise ConfigError(
            f"training.grpo.{needing} training.forward_pass=engine, whose log-probabilities are those of sampling"
        )


def advantages(rewards: np.ndarray, num_generations: int, scaled_by: str = "group") -> np.ndarray:
    """Computes the advantage of each answer over its group of adjacent ones: float64 [N] -> [N].

    It is divided by the standard deviation of its group, or of the whole "batch" (of a sample, plus MIN_DEVIATION, as
    in TRL), or by nothing ("none").
    """
    groups = rewards.astype(np.float64).reshape(-1, num_generations)
    found = groups - groups.mean(axis=1, keepdims=True)
    if scaled_by == "group":
        found /= groups.std(axis=1, ddof=1, keepdims=True) + MIN_DEVIATION
    elif scaled_by == "batch":
        found /= groups.std(ddof=1) + MIN_DEVIATION
    return found.reshape(-1)
