"""Steps of vLLM's scheduler on jaxis' runner, over vLLM's block tables, with results in vLLM's types."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from jaxis.engine.execution.dispatched_step import DispatchedStep, ForwardedStep
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.token_logprobs import TokenLogprobs, joined_logprobs
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput as Step
from jaxis.errors import EngineError
from jaxis.integrations.vllm.adapters import AdapterTable
from jaxis.integrations.vllm.contract import check_step
from jaxis.integrations.vllm.drafts import Drafts
from jaxis.integrations.vllm.encoder_cache import EncoderCache
from jaxis.integrations.vllm.requests import RequestTable, ScheduledRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = init_logger("vllm.jaxis")  # vLLM shows what is below its own name


class ModelRunner:
    """Runs the steps of vLLM's scheduler, which may schedule one step before it has the result of the last.

    Attributes:
      runner: Runner of the steps on the devices.
      requests: Requests that vLLM's scheduler has not finished.
      adapters: Adapters for requests; None without adapters.
      encoder_cache: Images of requests; None without images.

    Args:
      runner: Runner of the steps on the devices.
      vllm_config: vLLM's configuration.
    """

    def __init__(self, runner: Runner, vllm_config: VllmConfig) -> None:
        self.runner = runner
        self.adapters: AdapterTable | None = None
        if (feature := runner.feature("adapter")) is not None and (lora := vllm_config.lora_config) is not None:
            self.adapters = AdapterTable(
                feature.store,
                lora.max_cpu_loras or lora.max_loras,
                has_prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
            )
        inputs = runner.feature("inputs")
        self.encoder_cache = None if inputs is None else EncoderCache(inputs.encoder)
        self.requests = RequestTable(
            vocab_size=runner.vocab_size,
            num_spans=len(runner.num_blocks),
            num_state_slots=runner.num_state_slots,
            seed=vllm_config.model_config.seed,
            logprobs_mode=vllm_config.model_config.logprobs_mode,
            adapters=self.adapters,
            encoder_cache=self.encoder_cache,
        )
        self._drafts = None
        if (speculative := vllm_config.speculative_config) is not None:
            self._drafts = Drafts(speculative, runner)
        self._executed: tuple[list[ScheduledRequest], ForwardedStep | DispatchedStep] | None = None
        self._newest: StepResult | None = None

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Dispatches a step's forward pass, and its sampler unless that has to wait.

        The sampler waits for the masks of grammars, and for tokens in flight that a request's parameters depend on.

        Returns:
          Result of a step without tokens; None: `sample` returns the result.

        Raises:
          EngineError: vLLM asks for something unsupported.
        """
        check_step(scheduler_output)
        if self._drafts is not None:
            for request_id in scheduler_output.finished_req_ids:
                if (request := self.requests.get(request_id)) is not None:
                    self._drafts.forget(request)
        self.requests.update(scheduler_output)
        if self.encoder_cache is not None:
            self.encoder_cache.update(scheduler_output, self.requests.images_of)
        scheduled = self.requests.schedule(
            scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        )
        if self.encoder_cache is not None:
            self.encoder_cache.check(each.entry for each in scheduled)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = Step(
            scheduled=tuple(each.entry for each in scheduled),
            num_decodes=sum(each.is_decode for each in scheduled),
            preempted=(),
        )
        if any(self.requests.sampler_waits(each) for each in scheduled):
            self._executed = scheduled, self.runner.forward(step)
        else:
            self._executed = scheduled, self.runner.dispatch(step, self.requests.sampling)
        return None

    def sample(self, grammar_output: GrammarOutput | None) -> StepResult:
        """Dispatches the sampler of the last executed step, if `execute` did not.

        Args:
          grammar_output: Masks of the requests with a grammar.
        """
        if self._executed is None:
            raise EngineError("a step was sampled that was not executed")
        scheduled, step = self._executed
        self._executed = None
        if isinstance(step, ForwardedStep):
            self.synchronize()
            _set_masks(scheduled, grammar_output)
            step = step.sample(self.requests.sampling)
        self._newest = StepResult(scheduled, step)
        return self._newest

    def take_drafts(self) -> DraftTokenIds | None:
        """Returns drafts for the requests that the newest step sampled for; None without drafting."""
        if self._drafts is None or self._newest is None:
            return None
        requests = [each.request for each in self._newest.scheduled if each.entry.samples and not each.request.error]
        drafts = self._drafts.propose(requests)
        return DraftTokenIds([request.request_id for request in requests], drafts)

    def synchronize(self) -> None:
        """Waits for the last sampled step and gives its tokens to its requests."""
        if self._newest is not None:
            _ = self._newest.get_output()


class StepResult(AsyncModelRunnerOutput):
    """Result of a dispatched step. Results are read in the order of steps.

    Attributes:
      scheduled: Requests of the step.

    Args:
      scheduled: Requests of the step.
      step: The step.
    """

    def __init__(self, scheduled: list[ScheduledRequest], step: DispatchedStep) -> None:
        self.scheduled, self._step = scheduled, step
        self._output: ModelRunnerOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the step's tokens and gives them to its requests, once."""
        if self._output is None:
            self._output = self._read()
        return self._output

    def get_kv_connector_output(self) -> None:
        """Returns None: there is no KV connector."""

    def _read(self) -> ModelRunnerOutput:
        scheduled, step = self.scheduled, self._step
        sampled: list[list[int]] = []
        for each, token_ids in zip(scheduled, step.new_token_ids()[0], strict=True):
            if not each.entry.samples:
                sampled.append([])
                continue
            if not token_ids or each.request.error is not None:
                token_ids = [_end(each)]
            each.request.add_tokens(token_ids)
            sampled.append(list(token_ids))
        for index, logprobs in step.prompt_logprobs:
            scheduled[index].request.add_prompt_logprobs(scheduled[index].entry.start, logprobs)
        ids = [each.request.request_id for each in scheduled]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=_logprobs_lists(scheduled, sampled, step.logprobs()),
            prompt_logprobs_dict={
                each.request.request_id: _prompt_logprobs(each.request.prompt_token_ids, parts)
                for each in scheduled
                if (parts := each.request.finished_prompt_logprobs(each.entry)) is not None
            },
        )


def _end(each: ScheduledRequest) -> int:
    """Returns the token that ends a request without a sampled token, because vLLM has no errors of single requests."""
    reason = each.request.error or "the model's logits are not finite"
    logger.error("jaxis ends the request %s: %s", each.request.request_id, reason)
    return each.request.end_token_id


def _set_masks(scheduled: list[ScheduledRequest], grammar_output: GrammarOutput | None) -> None:
    """Sets each grammar request's own mask, or none if the scheduler allows it all tokens."""
    rows: dict[str, np.ndarray] = {}
    if grammar_output is not None:
        # The rows are in the order of these ids.
        ids = grammar_output.structured_output_request_ids
        num_rows = {each.request.request_id: each.entry.num_rows for each in scheduled}
        rows = dict(
            zip(ids, rows_of_requests(grammar_output.grammar_bitmask, [num_rows[each] for each in ids]), strict=True)
        )
    for each in scheduled:
        if each.request.masks is not None:
            each.request.masks.set_masks(rows.get(each.request.request_id))


def rows_of_requests(bitmask: np.ndarray, num_rows: Sequence[int]) -> list[np.ndarray]:
    """Splits a grammar bitmask by requests.

    Args:
      bitmask: int32 [rows, W]. Up to vLLM 0.32, each request has as many rows as it needs; in 0.33, all have as many as
        the one with the most drafts.
      num_rows: Number of rows that each request needs.
    """
    if len(bitmask) == sum(num_rows):
        starts = itertools.accumulate(num_rows, initial=0)
    else:
        starts = itertools.count(0, len(bitmask) // len(num_rows))
    return [bitmask[start : start + number] for start, number in zip(starts, num_rows, strict=False)]


def _logprobs_lists(
    scheduled: list[ScheduledRequest], sampled: list[list[int]], logprobs: TokenLogprobs[np.ndarray] | None
) -> LogprobsLists | None:
    """Returns a row for each token of the requests' outputs; the token itself is first in its row."""
    if logprobs is None:
        return None
    first_rows = itertools.accumulate((each.entry.num_rows for each in scheduled), initial=0)
    rows = [row + i for row, tokens in zip(first_rows, sampled, strict=False) for i in range(len(tokens))]
    token_ids = np.asarray(list(itertools.chain(*sampled)), np.int32)
    return LogprobsLists(
        np.concatenate([token_ids[:, None], logprobs.top_ids[rows]], axis=1),
        np.concatenate([logprobs.logprobs[rows, None], logprobs.top_logprobs[rows]], axis=1),
        logprobs.ranks[rows],
        list(itertools.accumulate(map(len, sampled), initial=0)),
    )


def _prompt_logprobs(prompt_token_ids: list[int], parts: list[TokenLogprobs[np.ndarray]]) -> LogprobsTensors:
    """Returns a row for each token of a prompt except the first; the token itself is first in its row."""
    joined = joined_logprobs(parts, len(prompt_token_ids) - 1)
    token_ids = np.asarray(prompt_token_ids[1:], np.int32)
    return LogprobsTensors(
        torch.from_numpy(np.concatenate([token_ids[:, None], joined.top_ids], axis=1)),
        torch.from_numpy(np.concatenate([joined.logprobs[:, None], joined.top_logprobs], axis=1)),
        torch.from_numpy(np.array(joined.ranks)),
    )
