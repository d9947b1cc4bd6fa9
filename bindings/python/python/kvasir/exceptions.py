"""What can go wrong. Every class is a `DynamoException`, and has the name that it has in `dynamo.llm.exceptions`."""

from __future__ import annotations


class DynamoException(Exception):
    """Anything that the router, a plane or a worker says went wrong."""


class Unknown(DynamoException):
    """A worker failed and does not say how."""


class InvalidArgument(DynamoException, ValueError):
    """The request asks for something that cannot be; the same request fails again."""


class CannotConnect(DynamoException):
    """A worker cannot be reached; nothing was sent."""


class Disconnected(DynamoException):
    """A worker vanished before its answer was complete."""


class ConnectionTimeout(DynamoException):
    """A worker did not answer in time."""


class Cancelled(DynamoException):
    """The request was cancelled."""


class EngineShutdown(DynamoException):
    """The engine is about to leave."""


class StreamIncomplete(DynamoException):
    """An answer ended without the mark that it is complete."""


class WorkerUnavailable(DynamoException):
    """No worker can take the request: none is there, none may serve it, or all are too busy."""


class RequestNotFound(DynamoException):
    """No request of this id is booked."""


class SelectionServiceError(DynamoException):
    """A selection service refused."""

    def __init__(self, message: str, kind: str = "", status_code: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.status_code = status_code


class RouterQueueLimitExceeded(DynamoException):
    """The queue of a policy class is full."""

    def __init__(self, message: str, policy_class: str = "", limit_kind: str = "", current: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.policy_class = policy_class
        """Whose queue."""
        self.limit_kind = limit_kind
        """Which bound: requests, raw_isl_tokens, cached_tokens or wait_ms."""
        self.current = current
        """Where it stands."""
        self.limit = limit
        """Where it ends."""


class HttpError(Exception):
    """An answer of a handler that is an HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code < 600:
            raise ValueError("an HTTP status is a whole number from 0 to 599")
        if not isinstance(message, str):
            raise ValueError("the message of an HttpError is a str")
        self.code = code
        self.message = message if len(message) <= 8192 else message[:8189] + "..."
        super().__init__(f"HTTP {code}: {self.message}")


__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "HttpError",
    "InvalidArgument",
    "RequestNotFound",
    "RouterQueueLimitExceeded",
    "SelectionServiceError",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]
