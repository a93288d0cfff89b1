"""The exceptions jaxis raises for a user's mistake.

Each message is one line: what was wrong, where, and what to do. The command line prints it without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_MESSAGE = 2000


def bounded(message: str) -> str:
    """Returns a message without its middle if it is too long for a line: it may quote a file or a request."""
    if len(message) <= _MAX_MESSAGE:
        return message
    head, tail = _MAX_MESSAGE * 3 // 4, _MAX_MESSAGE // 4
    return f"{message[:head]} [... {len(message) - head - tail} characters ...] {message[-tail:]}"


class JaxisError(Exception):
    """Base of every error that jaxis raises on purpose."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class ConfigError(JaxisError, ValueError):
    """An engine argument, or a key of a checkpoint's configuration, that cannot be honoured.

    Attributes:
      keys: Keys of the checkpoint's config.json that are at fault, nested ones with dots; empty if none is.
    """

    def __init__(self, message: str, *, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class UnknownArgumentError(ConfigError, TypeError):
    """An engine argument with an unknown name. Also a TypeError, as of any function."""


class AdaptersInUseError(ConfigError):
    """Raised if `max_cpu_loras` adapters are known and sequences use all of them."""


class CheckpointError(JaxisError):
    """A checkpoint that cannot be found or read, or whose tensors do not match the model's parameters.

    Attributes:
      tensor: Name of the tensor at fault, in full or below the module that refused it; None if no single one is.
    """

    def __init__(self, message: str = "", *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class RequestError(JaxisError, ValueError):
    """A prompt or a parameter of a request that cannot be honoured; only that request fails.

    Attributes:
      param: Parameter at fault, such as "top_p" or "tools[0].function.name"; None if no single one is.
      message: Error without the parameter's name.

    Args:
      message: Description of the fault, and of its correction. With `param`, the rest of a sentence that begins with
        the parameter, such as "must be positive" or "=0 must be positive".
      param: Parameter at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        space = "" if param is None or message.startswith(("=", ":", "[", ".")) else " "
        super().__init__(f"{param or ''}{space}{message}")
        self.message = bounded(message)
        self.param = param

    def about(self, param: str) -> RequestError:
        """Returns the same error about a parameter of another name."""
        return RequestError(self.message, param=param)


class ContextLengthError(RequestError):
    """A prompt that leaves no room in the model's context.

    Attributes:
      num_prompt_tokens: Length of the prompt.
      max_model_len: Most tokens of a request, prompt and output together.

    Args:
      num_prompt_tokens: Length of the prompt.
      max_model_len: Most tokens of a request.
      at_least: True if the prompt may be longer.
      may_grow: True if the model allows a larger max_model_len.
    """

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, *, at_least: bool = False, may_grow: bool = True
    ) -> None:
        # Clients look for the words "maximum context length is N tokens".
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, and this model's maximum "
            f"context length is {max_model_len} tokens, which must hold the prompt and at least one more: shorten it"
            + (", or start the server with a larger --max-model-len" if may_grow else "")
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class EngineError(JaxisError, RuntimeError):
    """The engine cannot go on: not enough memory, or a step that failed."""


class OverloadedError(JaxisError):
    """The queue is full; the request was not taken.

    Attributes:
      retry_after_seconds: Time after which to try again.
    """

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RateLimitError(OverloadedError):
    """The holder of an API key has asked for more than its limit in a minute.

    Attributes:
      limit: Exceeded limit: "requests" or "tokens".
    """

    def __init__(self, message: str, retry_after_seconds: int, *, limit: str) -> None:
        super().__init__(message, retry_after_seconds)
        self.limit = limit


class UnavailableError(EngineError):
    """The engine takes no requests any more: it is being shut down, or has failed for good."""


class DeadlineExceededError(JaxisError):
    """A request that took longer than it was given; it was aborted."""
