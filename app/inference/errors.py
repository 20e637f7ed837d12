"""What can go wrong between us and an engine.

AttuneError
├── Unavailable
│   └── EngineUnavailable     down, refused, silent or broken off: ask another replica, or later
│       └── AdapterMissing    alive, but it does not hold the version that was named
└── EngineRefused             it understood and said no: asking again will not help
"""

from app.core.errors import AttuneError, Unavailable


class EngineUnavailable(Unavailable):
    pass


class AdapterMissing(EngineUnavailable):
    pass


class EngineRefused(AttuneError):
    """What it finds wrong with a request is the client's to mend; anything else (a wrong key, say) is ours,
    and leaves as 502."""

    def __init__(self, engine_status: int, message: str) -> None:
        super().__init__(message, code="engine_refused")
        self.engine_status = engine_status
        if engine_status in (400, 413, 422):
            self.status = 400
            self.type = "invalid_request_error"
        else:
            self.status = 502
