"""The command that runs Claude Code with a server."""

from __future__ import annotations

from jaxis.server.clients import Client, ServerAddress, environment


def _command(server: ServerAddress) -> str:
    # Its helpers ask for other models by names of their own.
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.max_model_len),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.num_answer_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return f"{environment(variables)} claude"


CLAUDE_CODE = Client("Claude Code", _command, is_agent=True)
