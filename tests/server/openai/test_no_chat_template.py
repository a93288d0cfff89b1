"""A base model behind the server: prompts are continued, and chat requests are told what to do."""

import types

import openai
import pytest

from jaxis.cli.serve import start_lines
from jaxis.server.config import ServerConfig
from tests.support.scripted_engine import ScriptedEngine, connected


@pytest.fixture
def base_model():
    engine = ScriptedEngine()
    engine.tokenizer.chat_templates = {}
    engine.text = "Paris."
    return engine


def test_prompts_are_continued_and_conversations_refused_with_what_to_do(base_model):
    with connected(base_model) as client:
        answer = client.completions.create(model="jaxis-tiny", prompt="The capital of France is")
        assert answer.choices[0].text == "Paris."
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="jaxis-tiny", messages=[{"role": "user", "content": "Hi"}])
    assert "no chat template: load it with one (--chat-template FILE or NAME, such as chatml" in str(refused.value)
    assert "/v1/completions" in str(refused.value)


def test_the_start_says_so_and_shows_a_request_that_works(base_model):
    lines = start_lines(base_model, ServerConfig(), "127.0.0.1", 8000, tls=False)
    assert any("chat requests are refused: --chat-template gives it one" in line for line in lines)
    assert "/v1/completions" in lines[-1]
    assert not any("claude" in line for line in lines)


def test_a_server_that_can_chat_shows_commands_for_clients():
    engine = ScriptedEngine()
    engine.info = types.SimpleNamespace(
        max_model_len=32768, max_num_seqs=1, num_cache_tokens=32768, capabilities=("completion",)
    )
    text = "\n".join(start_lines(engine, ServerConfig(api_keys=("k",)), "0.0.0.0", 81, tls=True))
    for client in ("Claude Code:", "Codex:", "opencode:", "Open WebUI:", "try:"):
        assert client in text
    assert 'ANTHROPIC_BASE_URL=https://127.0.0.1:81 ANTHROPIC_AUTH_TOKEN="$JAXIS_API_KEY"' in text
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=32768" in text
    assert "anyone who reaches this address" not in text
