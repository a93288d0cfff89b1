"""Endpoints with token ids, for trainers and routers that render prompts and decode tokens themselves."""
