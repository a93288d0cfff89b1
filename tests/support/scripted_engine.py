"""A model that says what it is told to, behind the server."""

import asyncio
import contextlib

import openai
import tokenizers
from starlette.testclient import TestClient

from jaxis import SamplingParams
from jaxis.engine.client.engine_client import EngineInfo, EngineStats
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.server.app import create_app
from jaxis.server.config import ServerConfig
from jaxis.server.run import make_server
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.config import TokenizerConfig
from tests.support.running_server import running

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %}(for {{ message.tool_call_id }}){% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% endif %}
"""


class ScriptedEngine:
    """Says one string, a few characters a step, whatever it is asked.

    Attributes:
      text, finish_reason, piece: Its answer, the answer's end, and the number of characters a step says.
      answers: Its answers to the next requests, before `text`.
      delay_seconds, pause_seconds: Time before its first step, and between steps.
      error: Raised in place of an answer.
      failure: Reason for which it has ended for good; None while it has not.
      stop_reason, num_cached_tokens: Told by its last step of the answer's end, and by every step of the prompt.
      prompt, prompt_token_ids, params, grammar: Parts of the last request.
    """

    def __init__(self, template=TEMPLATE, tags=(), max_model_len=1000):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code - 32 for code in range(32, 127)}, []))
        backend.decoder = tokenizers.decoders.Fuse()
        backend.add_tokens(list(tags))
        self.tokenizer = Tokenizer(backend, TokenizerConfig(chat_templates={"default": template}))
        self.grammar_compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size, [])
        self.info = EngineInfo(
            model_folder="",
            model_type=None,
            default_sampling_params=SamplingParams(max_tokens=None),
            max_model_len=max_model_len,
            max_num_seqs=1,
            num_cache_tokens=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=frozenset(),
        )
        self.is_accepting = self.is_making_progress = True
        self.num_reserved = 0
        self.text, self.finish_reason, self.piece = "", "stop", 3
        self.stop_reason, self.num_cached_tokens = None, 0
        self.answers = []
        self.delay_seconds = self.pause_seconds = 0.0
        self.error = self.failure = None
        self.prompt = self.prompt_token_ids = self.params = self.grammar = None

    unit = "completions"

    def start(self):
        pass

    async def drain(self, deadline_seconds):
        pass

    async def shutdown(self):
        pass

    def stats(self):
        return EngineStats()

    def reserve(self, num_sequences):
        return contextlib.nullcontext()

    async def generate(self, prompt, params, request_id, *, final_only=False, grammar=None, **_):
        self.prompt, self.prompt_token_ids, self.params, self.grammar = prompt.text, prompt.token_ids, params, grammar
        text = self.answers.pop(0) if self.answers else self.text
        await asyncio.sleep(self.delay_seconds)
        if self.error is not None:
            raise self.error
        size = max(1, len(text)) if final_only else self.piece
        pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            await asyncio.sleep(self.pause_seconds if number > 1 else 0.0)
            token_ids = self.tokenizer.encode(text) if last else []
            completions = [
                CompletionOutput(
                    index,
                    piece,
                    list(token_ids),
                    finish_reason=self.finish_reason if last else None,
                    stop_reason=self.stop_reason if last else None,
                )
                for index in range(params.n)
            ]
            ids = list(prompt.token_ids)
            yield RequestOutput(request_id, prompt.text, ids, None, completions, last, self.num_cached_tokens)


class ScriptedClient(openai.OpenAI):
    """An `openai` client of a server in this process; `http` makes any other request to it."""

    def __init__(self, http_client, **options):
        own = {"base_url": "http://testserver/v1", "api_key": "none", "max_retries": 0}
        super().__init__(http_client=http_client, **own | options)
        self.http = http_client


def asking(engine, **settings):
    """An HTTP client of a server over an engine, in this process."""
    return TestClient(create_app(engine, ServerConfig(**settings)), base_url="http://testserver")


@contextlib.contextmanager
def connected(engine, **settings):
    """An `openai` client of a server over an engine."""
    with asking(engine, **settings) as http:
        yield ScriptedClient(http)


@contextlib.contextmanager
def served(engine, **settings):
    """The address of a server over an engine, with sockets, for clients that bring their own."""
    with running(make_server(engine, ServerConfig(**{"drain_seconds": 1.0} | settings))) as (url, _):
        yield url
