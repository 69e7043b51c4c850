"""Everything that forerun raises on purpose.

    ForerunError
    ├── ConfigError            a flag or key: stops the start, before weights are loaded
    │   └── CheckpointError    a model file that is missing, broken or not ours to run
    ├── RequestError           one request is wrong: HTTP 400, nobody else notices
    │   └── ModelNotFoundError the request names a model that is not served: HTTP 404
    ├── UnavailableError       no request is taken just now: HTTP 503, try again later
    │   └── QueueFullError     as many requests wait as may wait
    ├── RequestTimeoutError    a request took longer than requests may: HTTP 504
    ├── RequestFailedError     the engine could not go on with a request: HTTP 500
    └── EngineDeadError        the engine process is gone: HTTP 500, /health says so

A message says what was wrong, the value, and what to do. `assert` is for what only our own mistake can break.
"""


class ForerunError(Exception):
    """Base of the tree."""


class ConfigError(ForerunError):
    """A flag or key that cannot be honoured. The message is one line that names the key and the value."""


class CheckpointError(ConfigError):
    """A model file that is missing, broken, or of a kind that is not supported; names the file or the tensor."""


class RequestError(ForerunError):
    """A request that cannot be honoured.

    Args:
        message: what is wrong, with the value, and what to do.
        param: the request field at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""


class UnavailableError(ForerunError):
    """No request is taken just now: the server ends, or its engine is being started again; try again later."""


class RequestTimeoutError(ForerunError):
    """A request took longer than requests may; what it had brought by then was sent, where it is a stream."""


class QueueFullError(UnavailableError):
    """As many requests wait as may wait; try again later."""


class RequestFailedError(ForerunError):
    """The engine could not go on with this request, through no fault of the request."""


class EngineDeadError(ForerunError):
    """The engine process ended; no request can be served until it is started again."""
