"""Restoration of thinking and token ids that clients leave out when they send this server's answers back.

Clients send back an answer's text, but rarely its thinking. If the chat template keeps thinking, such a prompt differs
from the tokens in the KV cache: all tokens from the first answer on are computed again. The server therefore remembers
its answers by the conversation before them, as the client sees it, and restores their thinking before the template
renders the next turn. If the prompt then begins with the text of the last turn, that turn's token ids are used, since
tokenizing decoded text may give other ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.parser_events import ParsedOutput, collect
from jaxis.prompts import TokenizedPrompt
from jaxis.server.generation.answer_reader import AnswerReader
from jaxis.server.generation.images import has_images
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.tokenizer import Tokenizer

MAX_ANSWERS, MAX_BYTES = 16384, 64 * 1024 * 1024
_OVERHEAD_BYTES = 512  # estimate for each answer
_MARK = "jaxis-thinking-probe"


@dataclass
class _Turn:
    """Prompt and answer of a whole turn: their tokens, and the length and digest of their text with special tokens."""

    num_characters: int
    digest: bytes
    token_ids: array[int]

    def begins(self, text: str) -> bool:
        return len(text) > self.num_characters and _digest(text[: self.num_characters]) == self.digest


@dataclass
class _Answer:
    """A remembered answer. `turn` is None if no prompt can continue it, or if a later turn has its tokens."""

    reasoning: str
    turn: _Turn | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the answer."""
        of_turn = 0 if self.turn is None else self.turn.token_ids.itemsize * len(self.turn.token_ids)
        return _OVERHEAD_BYTES + len(self.reasoning.encode("utf-8", "surrogatepass")) + of_turn


class RestoredThinking:
    """Memory of the most recently used answers, which it restores in prompts. It is thread-safe.

    A client gets back only answers to its own API key (without keys: its address), by the same model and under the same
    cache salt.

    Args:
      max_answers: Most answers to remember; 0 turns the feature off.
      max_bytes: Most memory for answers.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers, self._max_bytes = max_answers, max_bytes
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self.num_bytes = 0
        """Estimated memory of all answers."""
        self._keeps: weakref.WeakKeyDictionary[Tokenizer, bool] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def tokenize(self, job: GenerationJob, owner: str | None) -> list[TokenizedPrompt]:
        """Returns the job's prompts like `GenerationJob.tokenize`, with restored thinking and token ids.

        The owner of the request is that of `UsageAccounting.client`, here and below.
        """
        prompts = job.prompts
        if not isinstance(prompts, ChatPrompt) or not self._answers or not self._applies(job):
            return job.tokenize()
        if has_images(prompts.messages):
            return job.tokenize()
        messages, turns = self._restored(job, prompts, owner)
        [prompt] = dataclasses.replace(job, prompts=dataclasses.replace(prompts, messages=messages)).tokenize()
        turn = next((turn for turn in reversed(turns) if prompt.text and turn.begins(prompt.text)), None)
        if turn is None or job.model.tokenizer is None or prompt.text is None:
            return [prompt]
        rest = job.model.tokenizer.encode(prompt.text[turn.num_characters :], add_special_tokens=False)
        return [dataclasses.replace(prompt, token_ids=[*turn.token_ids, *rest])]

    def listen(self, job: GenerationJob, prompt: TokenizedPrompt, owner: str | None) -> AnswerListener | None:
        """Returns a listener for the outputs of a prompt that `tokenize` returned, which remembers its answers.

        None if none can be remembered.
        """
        # The text of a prompt with images does not identify the images.
        if not isinstance(job.prompts, ChatPrompt) or has_images(job.prompts.messages):
            return None
        if job.prompts.continue_final_message or not self._applies(job):
            return None
        return AnswerListener(self, job, prompt, owner)

    def remember(
        self, job: GenerationJob, prompt: TokenizedPrompt, owner: str | None, completion: CompletionOutput
    ) -> None:
        """Remembers a finished answer."""
        parsed = _parsed(job, prompt, completion)
        answer = _Answer(parsed.reasoning, _turn(job, prompt, completion))
        if not isinstance(job.prompts, ChatPrompt) or not (answer.reasoning or answer.turn):
            return
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.tool_calls]
        message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        *before, key = [key for key, _ in _digests(job, [*job.prompts.messages, message], owner)]
        with self._lock:
            self._forget(key)
            if answer.turn is not None:
                self._drop_tokens(before, answer.turn)
            self._answers[key] = answer
            self.num_bytes += answer.num_bytes
            while len(self._answers) > self._max_answers or self.num_bytes > self._max_bytes:
                self._forget(next(iter(self._answers)))

    def _applies(self, job: GenerationJob) -> bool:
        """Returns whether the model reasons and its chat template keeps thinking."""
        tokenizer = job.model.tokenizer
        if self._max_answers == 0 or tokenizer is None or job.model.parsers.reasoning is None:
            return False
        if tokenizer not in self._keeps:
            self._keeps[tokenizer] = keeps_thinking(tokenizer)
        return self._keeps[tokenizer]

    def _restored(
        self, job: GenerationJob, prompts: ChatPrompt, owner: str | None
    ) -> tuple[list[Mapping[str, Any]], list[_Turn]]:
        """Returns the messages with restored thinking, and the remembered turns among them, in order."""
        messages: list[Mapping[str, Any]] = []
        turns: list[_Turn] = []
        continued = len(prompts.messages) - 1 if prompts.continue_final_message else None
        with self._lock:
            for index, (key, message) in enumerate(_digests(job, prompts.messages, owner)):
                answer = self._answers.get(key) if message["role"] == "assistant" and index != continued else None
                if answer is None:
                    messages.append(message)
                    continue
                self._answers.move_to_end(key)
                is_whole = not answer.reasoning or message.get("reasoning_content") is not None
                messages.append(message if is_whole else {**message, "reasoning_content": answer.reasoning})
                if answer.turn is not None:
                    turns.append(answer.turn)
        return messages, turns

    def _drop_tokens(self, keys: Sequence[bytes], turn: _Turn) -> None:
        """Drops the tokens of earlier turns with which a later turn begins."""
        for key in keys:
            answer = self._answers.get(key)
            if answer is not None and answer.turn is not None:
                before = answer.turn.token_ids
                if turn.token_ids[: len(before)] == before:
                    self.num_bytes -= answer.num_bytes
                    answer.turn = None
                    self.num_bytes += answer.num_bytes

    def _forget(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.num_bytes -= answer.num_bytes


class AnswerListener:
    """Collector of a prompt's outputs. Each answer is remembered when it ends."""

    def __init__(
        self, memory: RestoredThinking, job: GenerationJob, prompt: TokenizedPrompt, owner: str | None
    ) -> None:
        self._memory, self._job, self._prompt, self._owner = memory, job, prompt, owner
        self._answers: dict[int, CompletionOutput] = {}

    def add(self, output: RequestOutput) -> None:
        """Adds an output. Call it before the client gets the output: a client may send its next turn at once."""
        for new in output.outputs:
            answer = self._answers.setdefault(new.index, CompletionOutput(new.index))
            answer.text += new.text
            answer.token_ids += new.token_ids
            answer.finish_reason, answer.stop_reason = new.finish_reason, new.stop_reason
            if answer.finished and answer.finish_reason != "abort":
                self._memory.remember(self._job, self._prompt, self._owner, answer)


def keeps_thinking(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template still shows an answer's thinking after the next question.

    A template that shows thinking only since the last question does not count: it would drop restored thinking at each
    question, so that all tokens since the last question, and not just the last answer, were computed again.
    """
    question = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b", "reasoning_content": _MARK}
    try:
        return _MARK in ChatPrompt(messages=[question, answer, question]).render(tokenizer)
    except RequestError:
        return False


def _digests(
    job: GenerationJob, messages: Sequence[Mapping[str, Any]], owner: str | None
) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """Yields each message with a digest of the conversation up to it, as the client sees it."""
    scope = [owner, job.model.name, job.model.fingerprint, job.model.adapter.hex(), job.prompts.cache_salt]
    digest = _digest(json.dumps(scope))
    for message in messages:
        seen = json.dumps(_as_seen(message), sort_keys=True, default=str, ensure_ascii=False)
        digest = _digest(digest.hex() + seen)
        yield digest, message


def _as_seen(message: Mapping[str, Any]) -> Any:
    """Returns a message without parts that clients drop or change: thinking, ids of calls, outer white space."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content")
    return ["assistant", content.strip() if isinstance(content, str) else content or "", calls]


def _canonical(arguments: Any) -> Any:
    """Returns a call's arguments, given as JSON or as an object, in a form that does not depend on formatting."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _parsed(job: GenerationJob, prompt: TokenizedPrompt, completion: CompletionOutput) -> ParsedOutput:
    with_reasoning = dataclasses.replace(job, answer=dataclasses.replace(job.answer, include_reasoning=True))
    output = RequestOutput(job.request_id, prompt.text, list(prompt.token_ids), None, [completion], finished=True)
    [(_, events)] = AnswerReader(with_reasoning).read(output)
    return collect(events)


def _turn(job: GenerationJob, prompt: TokenizedPrompt, completion: CompletionOutput) -> _Turn | None:
    """Returns a prompt and its answer; None unless they end with a special token, where tokenizing can continue."""
    tokenizer = job.model.tokenizer
    if tokenizer is None or prompt.text is None or not completion.token_ids:
        return None
    if tokenizer.decode(completion.token_ids[-1:]):
        return None
    text = prompt.text + tokenizer.decode(completion.token_ids, skip_special_tokens=False)
    return _Turn(len(text), _digest(text), array("i", [*prompt.token_ids, *completion.token_ids]))
