from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import SamplingParams
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import StepContext
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.data import Split
from jaxis.training.distillation.teacher_prompts import TaughtBatches, taught
from jaxis.training.examples import Example
from jaxis.training.live_engine import LiveEngine, answer_seed


class StudentAnswers:
    """Batches in which the student answers a share of the prompts when a step begins.

    For given weights, answers and the choice of answered prompts depend on the seed and the step only.

    Args:
      prompts: Token ids of the prompt of each example.
      teachers: Token ids of the teacher's prompts; None: the same.
    """

    shown: Sequence[str] = ()

    def __init__(
        self,
        config: TrainConfig,
        base: BaseModel,
        split: Split,
        prompts: Sequence[list[int]],
        teachers: Sequence[list[int]] | None,
    ) -> None:
        training, self._params = config.training, config.training.distillation
        self._base, self._split, self._prompts, self._seed = base, split, prompts, training.data_seed
        self._teachers = teachers
        self._max_tokens = max(map(len, prompts)) + self._params.max_completion_length
        more = 0
        for number, (ids, example) in enumerate(zip(prompts, split.examples, strict=True)):
            base.check_ids(ids, example.where)
            if teachers is not None:
                base.check_ids(teachers[number], example.where)
                more = max(more, len(teachers[number]) - len(ids))
        longest = more + max(self._max_tokens, *(len(example.ids) for example in split.examples))
        self._shape = BatchShape(training.gradient_accumulation_steps, training.per_device_train_batch_size, longest)
        self._engine: LiveEngine | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._split.batches.steps_per_epoch

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        # NumPy guarantees the stream of this generator, whatever its version.
        places = [place for [place] in self._split.batches.rows(context.step)]
        is_sampled = np.random.RandomState([self._seed, context.step]).random_sample(len(places)) < self._params.lmbda
        numbers = np.flatnonzero(is_sampled).tolist()
        answers = self._answers(context, {number: self._prompts[places[number]] for number in numbers})
        examples = [self._split.examples[place] for place in places]
        for number, answer in answers.items():
            examples[number] = self._example(places[number], answer)
            if self._params.log_completions:
                line = {"step": context.step + 1, "row": examples[number].where, "answer": answer.text}
                context.write_answer(line)
        measured: dict[str, float] = {"sampled": len(numbers) / len(places)}
        if answers:
            measured["completion_length"] = float(np.mean([len(each.token_ids) for each in answers.values()]))
            measured["completions_cut"] = float(np.mean([each.finish_reason == "length" for each in answers.values()]))
        return self._batch(places, examples), measured

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Accepts every step."""

    def summary(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _batch(self, places: Sequence[int], examples: Sequence[Example]) -> TrainingBatch:
        if (teachers := self._teachers) is None:
            return Batches([(example,) for example in examples], self._shape, seed=None).batch(0)
        pairs = [taught(each, self._prompts[i], teachers[i]) for i, each in zip(places, examples, strict=True)]
        own, theirs = zip(*pairs, strict=True)
        return TaughtBatches(own, theirs, self._shape).batch(0)

    def _answers(self, context: StepContext, prompts: Mapping[int, list[int]]) -> dict[int, CompletionOutput]:
        """Answers prompts, given by their number in the step, with the current weights."""
        if not prompts:
            return {}
        if self._engine is None:
            self._engine = LiveEngine(self._base, self._max_tokens, context.progress)
        sampling = [
            SamplingParams(
                temperature=self._params.temperature,
                seed=answer_seed([self._seed, context.step, number]),
                max_tokens=self._params.max_completion_length,
            )
            for number in prompts
        ]
        found = self._engine.answers(context.model(), list(prompts.values()), sampling)
        return dict(zip(prompts, found, strict=True))

    def _example(self, place: int, answer: CompletionOutput) -> Example:
        prompt, sampled = self._prompts[place], answer.token_ids
        learned = np.arange(len(prompt) + len(sampled)) >= len(prompt)
        return Example(np.asarray([*prompt, *sampled], np.int32), learned, self._split.examples[place].where)
