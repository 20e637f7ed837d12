"""Errors of requests to an engine.

AttuneError
├── Unavailable
│   └── EngineUnavailable     connection refused, lost or timed out: try another replica, or later
│       └── AdapterMissing    the engine runs, but does not hold the requested version
└── EngineRefused             the engine rejected the request: a retry will not help
"""

from app.core.errors import AttuneError, Unavailable


class EngineUnavailable(Unavailable):
    pass


class AdapterMissing(EngineUnavailable):
    pass


class EngineRefused(AttuneError):
    """The engine rejected a request. A mistake of the client results in 400, anything else (a wrong key) in 502."""

    def __init__(self, engine_status: int, message: str) -> None:
        super().__init__(message, code="engine_refused")
        self.engine_status = engine_status
        if engine_status in (400, 413, 422):
            self.status = 400
            self.type = "invalid_request_error"
        else:
            self.status = 502
