"""Tokens in, tokens out: what trainers and routers ask of a server, which render prompts and read tokens themselves."""
