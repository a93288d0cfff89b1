"""Reader of a job's outputs: splits them into content, reasoning and tool calls, whole or streamed, and counts them."""

from __future__ import annotations

import time

from jaxis.engine.grammar.mark_tracker import MarkTracker
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.generation.grammar import marks_before_answer
from jaxis.server.generation.job import GenerationJob


class AnswerCounts:
    """Counts of the tokens of a job's answers, and times of their phases from the request's arrival (creation) on."""

    def __init__(self) -> None:
        self._arrival = self._first_step = self._first_token = self._last_token = time.monotonic()
        self._prompts: dict[int, tuple[int, int]] = {}
        self._guesses: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self.num_tokens = 0
        """Number of generated tokens."""

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Adds an output of the prompt with this index. Each prompt counts once, whatever `n` is."""
        self._last_token = time.monotonic()
        if not self._prompts:
            self._first_token = output.first_token_time or self._last_token
            self._first_step = min(output.first_scheduled_time or self._first_token, self._first_token)
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for completion in output.outputs:
            self.num_tokens += len(completion.token_ids)
            self._guesses[prompt, completion.index] = (
                completion.num_accepted_predictions,
                completion.num_rejected_predictions,
                completion.num_drafts,
                completion.num_accepted_drafts,
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(num_tokens for num_tokens, _ in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return sum(num_cached for _, num_cached in self._prompts.values())

    @property
    def num_accepted_predictions(self) -> int:
        """Number of tokens that the request's prediction guessed right."""
        return sum(accepted for accepted, *_ in self._guesses.values())

    @property
    def num_rejected_predictions(self) -> int:
        """Number of tokens that the request's prediction guessed wrong."""
        return sum(rejected for _, rejected, *_ in self._guesses.values())

    @property
    def num_drafts(self) -> int:
        return sum(drafts for *_, drafts, _ in self._guesses.values())

    @property
    def num_accepted_drafts(self) -> int:
        return sum(accepted for *_, accepted in self._guesses.values())

    @property
    def total_seconds(self) -> float:
        """Time from arrival to now."""
        return time.monotonic() - self._arrival

    @property
    def waiting_seconds(self) -> float:
        """Time from arrival to the first step."""
        return max(0.0, self._first_step - self._arrival)

    @property
    def prefill_seconds(self) -> float:
        """Time from the first step to the first token."""
        return self._first_token - self._first_step

    @property
    def decode_seconds(self) -> float:
        """Time from the first token to the last."""
        return max(0.0, self._last_token - self._first_token)


class AnswerReader:
    """Reader of the outputs of a job with one prompt. It reads each output once.

    Attributes:
      counts: Counts of everything read so far.
    """

    def __init__(self, job: GenerationJob) -> None:
        self.counts = AnswerCounts()
        self._job = job
        self._completions: dict[int, _CompletionReader] = {}

    def read(self, output: RequestOutput) -> list[tuple[CompletionOutput, list[Event]]]:
        """Returns each completion that an output adds to, with the events of the added part."""
        self.counts.add(0, output)
        return [(completion, self._reader(output, completion).read(completion)) for completion in output.outputs]

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Returns OpenAI's finish reason of a completion, or None before its end. Call it after `read`."""
        has_calls = self._completions[completion.index].num_calls > 0
        return "tool_calls" if completion.finish_reason == "stop" and has_calls else completion.finish_reason

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(reader.num_reasoning_tokens for reader in self._completions.values())

    def _reader(self, output: RequestOutput, completion: CompletionOutput) -> _CompletionReader:
        reader = self._completions.get(completion.index)
        if reader is None:
            reader = self._completions[completion.index] = _CompletionReader(self._job, output.prompt or "")
        return reader


class _CompletionReader:
    """Reader of one completion. `num_calls` is the number of its tool calls so far."""

    def __init__(self, job: GenerationJob, prompt: str) -> None:
        answer = job.answer
        self.num_calls = self._num_malformed = 0
        self._include_reasoning = answer.include_reasoning
        self._parallel_tool_calls = answer.tools.parallel
        self._token_ids: list[int] = []
        reasoning_parser = answer.reasoning_parser
        before = marks_before_answer(reasoning_parser, prompt, job.model.tokenizer)
        if answer.grammar is not None and before is None and not answer.grammar.holds_reasoning:
            reasoning_parser = None  # the grammar applies from the first token
        tokenizer, marks = job.model.tokenizer, reasoning_parser and reasoning_parser.marks(prompt)
        self._tracker = MarkTracker(marks, tokenizer) if marks and tokenizer else None
        self._parser: OutputParser | None = None
        if answer.tools.parser is not None or reasoning_parser is not None:
            self._parser = OutputParser(answer.tools.parser, reasoning_parser, tools=answer.tools.tools, prompt=prompt)

    def read(self, completion: CompletionOutput) -> list[Event]:
        """Returns the events of the completion's next part. `completion.text` holds only text that was not read yet."""
        if self._parser is None:
            return [ContentDelta(completion.text)] if completion.text else []
        if self._tracker is not None:
            self._token_ids += completion.token_ids
            self._tracker.follow(self._token_ids)
        events = self._parser.feed(completion.text)
        if completion.finished:
            events += self._parser.finish()
        wanted: list[Event] = []
        for event in events:
            if not self._is_wanted(event):
                continue
            wanted.append(event)
            if isinstance(event, ToolCallStart):
                self.num_calls += 1
            elif isinstance(event, ToolCallEnd) and event.status == "malformed":
                self.num_calls -= 1
                self._num_malformed += 1
        return wanted

    @property
    def num_reasoning_tokens(self) -> int:
        return self._tracker.num_tokens if self._tracker else 0

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._include_reasoning
        if isinstance(event, ToolCallStart | ToolCallArgumentsDelta | ToolCallEnd):
            return self._parallel_tool_calls or event.index <= self._num_malformed
        return True
