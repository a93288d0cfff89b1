"""Endpoints that are not of one protocol alone."""
