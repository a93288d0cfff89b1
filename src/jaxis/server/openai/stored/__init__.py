"""Stored responses of /v1/responses."""
