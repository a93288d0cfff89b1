"""A server with the chat page whose answers are written down beforehand."""

import asyncio
import contextlib
import json
import threading

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from jaxis.server.routes.chat_page import add_chat_page
from tests.support.running_server import running


class ScriptedApi:
    """Answers each chat request with the next of `script`.

    A part of the script is (status, headers, message), which is an error, or a list of chunks: {"delta", "usage",
    "finish_reason"}, or "gate", which waits for `open_gate`, or "break", which ends the stream before its time.
    """

    def __init__(self):
        self.script = []
        self.bodies = []
        self._gate = threading.Event()
        app = FastAPI()
        add_chat_page(app)
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))

    def open_gate(self):
        self._gate.set()

    async def _models(self):
        model = {"id": "scripted", "max_model_len": 4096, "default_parameters": {"temperature": 0.6, "top_k": 20}}
        return {"data": [{**model, "input_modalities": ["text", "image"]}]}

    async def _chat(self, request: Request):
        self.bodies.append(await request.json())
        part = self.script.pop(0)
        if isinstance(part, tuple):
            status, headers, message = part
            return JSONResponse({"error": {"message": message}}, status, headers)
        return StreamingResponse(self._events(part), media_type="text/event-stream")

    async def _events(self, chunks):
        for chunk in chunks:
            if chunk == "break":
                return
            if chunk == "gate":
                while not self._gate.is_set():
                    await asyncio.sleep(0.01)
                self._gate.clear()
            else:
                usage = chunk.get("usage")
                choice = {"index": 0, "delta": chunk.get("delta", {}), "finish_reason": chunk.get("finish_reason")}
                yield f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    @contextlib.contextmanager
    def serving(self):
        """Serves while the block runs."""
        with running(self._server) as (self.url, _):
            try:
                yield self
            finally:
                self._gate.set()


def answer(text, finish_reason="stop"):
    """The chunks of an answer of some text, a word at a time."""
    words = text.split(" ")
    chunks = [{"delta": {"role": "assistant", "content": ""}}]
    chunks += [{"delta": {"content": word + " " * (i < len(words) - 1)}} for i, word in enumerate(words)]
    usage = {"prompt_tokens": 5, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 2}}
    return [*chunks, {"finish_reason": finish_reason, "usage": usage}]
