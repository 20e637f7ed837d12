"""The long-lived objects of one API process, registered by type."""

from typing import TypeVar

from starlette.requests import HTTPConnection

from app.core.settings import Settings

T = TypeVar("T")


class Services:
    """Holds one object of each type. `app.main` adds them at start; handlers get them with `services_of`.

    Example: services_of(request).get(Database)
    """

    def __init__(self) -> None:
        self._by_type: dict[type, object] = {}

    def put(self, service: T) -> T:
        """Add an object, or replace the one of its type, and return it."""
        self._by_type[type(service)] = service
        return service

    def get(self, kind: type[T]) -> T:
        """Return the object of exactly this type. Raises LookupError when the process has none."""
        service = self._by_type.get(kind)
        if not isinstance(service, kind):
            raise LookupError(f"this process holds no {kind.__name__}: is its lifespan running?")
        return service


def services_of(connection: HTTPConnection) -> Services:
    """Return the services of the application that handles this request."""
    services: Services = connection.app.state.services
    return services


def settings_of(connection: HTTPConnection) -> Settings:
    """Return the settings of the application that handles this request."""
    return services_of(connection).get(Settings)
