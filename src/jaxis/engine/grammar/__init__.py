"""Structured output: grammars compiled and followed."""
