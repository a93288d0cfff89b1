"""Stored responses and conversations of /v1/responses and /v1/conversations."""
