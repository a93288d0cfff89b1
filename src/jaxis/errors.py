"""The exceptions jaxis raises for a user's mistake.

Each message is one line: what was wrong, where, and what to do. The command line prints it without a traceback.
"""


class JaxisError(Exception):
    """Base of every error that jaxis raises on purpose."""


class ConfigError(JaxisError, ValueError):
    """An engine argument, or a key of a checkpoint's configuration, that cannot be honoured."""


class CheckpointError(JaxisError):
    """A checkpoint that cannot be found or read, or whose tensors do not match the model's parameters."""


class RequestError(JaxisError, ValueError):
    """A prompt or sampling parameter that cannot be honoured; only that request fails."""


class EngineError(JaxisError, RuntimeError):
    """The engine cannot go on: not enough memory, or a step that failed."""
