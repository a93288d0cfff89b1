"""Asks a server and brings its answer, whole or streamed, into one form that can be compared."""

from __future__ import annotations

import aiohttp

from serving.answer_forms import Answer, AnswerForm, FailedError
from serving.chat_answers import CompletionsForm
from serving.message_answers import MessagesForm
from serving.ollama_answers import OllamaForm
from serving.request_mix import MixItem
from serving.response_answers import ResponsesForm

REFUSALS = (429, 503)
_FORMS: dict[str, AnswerForm] = {
    "/v1/chat/completions": CompletionsForm(),
    "/v1/completions": CompletionsForm(),
    "/v1/responses": ResponsesForm(),
    "/v1/messages": MessagesForm(),
    "/api/chat": OllamaForm(),
    "/api/generate": OllamaForm(),
}


class RefusedError(Exception):
    """The server said that it is too busy, or about to end.

    Attributes:
      status: Its status code.
      retry_after: When to try again, in seconds.
    """

    def __init__(self, status: int, retry_after: float) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after = retry_after


async def ask(session: aiohttp.ClientSession, item: MixItem, *, stream: bool) -> Answer:
    """One answer.

    Raises:
      RefusedError: 429 or 503, with a Retry-After where the queue is full.
      FailedError: Another status, an error in the stream, or a stream that ends early.
    """
    form = _FORMS[item.path]
    body = {**item.body, "stream": stream, **(form.stream_fields if stream else {})}
    async with session.post(item.path, json=body) as response:
        if response.status in REFUSALS:
            if response.status == 429 and "Retry-After" not in response.headers:
                raise FailedError("429 without Retry-After")
            raise RefusedError(response.status, float(response.headers.get("Retry-After", 1)))
        if response.status != 200:
            raise FailedError(f"status {response.status}: {(await response.text())[:300]}")
        if not stream:
            return form.whole(await response.json())
        return form.folded([line async for line in response.content])
