"""HTTP to judges and services: one POST of JSON, limited in time and size, without redirects, to allowed hosts only.

A URL that a project configures leads to public addresses, or to hosts that are listed. The name is resolved once, and
the connection goes to exactly the address that was checked. A name server that changes its answer between two look-ups
(DNS rebinding) gains nothing.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit, urlunsplit

import httpx2
import orjson

from alignment.config.rewards import EndpointConfig
from app.core.hosts import normalize_host
from app.core.settings import Settings
from workers.judging.request import Usage
from workers.queue.leased_job import AttemptFailed, JobFailed

MAX_RESPONSE_BYTES = 1 << 20
GUARDED = "attune_guarded"  # key of a request's extensions
NOT_PUBLIC = "its host is in no public network, and ATTUNE_SERVER__PRIVATE_HOSTS does not list it"
METADATA_ADDRESSES = {ipaddress.ip_address("168.63.129.16")}  # a cloud's own service at a public address
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not every Python version knows these: protocol assignments (a cloud's metadata among them), local NAT64, site-local
# addresses, two old forms of IPv4 in IPv6, segment routing.
NOT_GLOBAL = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10", "::/96", "::ffff:0:0:0/96", "5f00::/16")
]


def open_client(settings: Settings) -> httpx2.AsyncClient:
    """Return a client without a time-out of its own: `time_limit` sets one around each question."""
    transport = GuardedTransport(settings.server.private_hosts)
    return httpx2.AsyncClient(transport=transport, trust_env=False, follow_redirects=False, timeout=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit everything from the connection to the last byte, so that a slow endpoint cannot hold the worker.

    Raises AttemptFailed.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise AttemptFailed(f"no answer within {seconds:g} s") from error


@dataclass(frozen=True)
class EndpointClient:
    """Sends questions to one endpoint, and counts them in `usage`.

    `is_policy_owned`: the URL comes from a project, not from the deployment, and may lead to public addresses only.
    """

    http: httpx2.AsyncClient
    endpoint: EndpointConfig
    key: str | None
    usage: Usage
    is_policy_owned: bool

    async def post_json(self, url: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        """Return the status and the content. Raises AttemptFailed, and JobFailed for a body that is not JSON.

        The reasons name neither the URL nor the key: they are stored where tenants can read them.
        """
        self.usage.requests += 1
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        content = bytearray()
        self.http.cookies.clear()  # a cookie of one answer must not go with the next question
        extensions = {GUARDED: self.is_policy_owned}
        try:
            request = self.http.stream("POST", url, content=orjson.dumps(body), headers=headers, extensions=extensions)
            async with request as response:
                if 300 <= response.status_code < 400:
                    raise AttemptFailed(f"it answered {response.status_code}: redirects are not followed")
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise AttemptFailed(f"it answered more than {MAX_RESPONSE_BYTES} bytes")
        except orjson.JSONEncodeError as error:
            raise JobFailed(f"the turn cannot be encoded as JSON: {error}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise AttemptFailed(f"it does not answer ({type(error).__name__})") from error
        return response.status_code, bytes(content)

    def quote(self, answer: str) -> str:
        """Return the start of the answer, to append to a reason.

        Empty where a project chose the address: its answer must not be passed on to whoever chose it.
        """
        return "" if self.is_policy_owned else f": {answer[:200]!r}"


def decode_answer(status: int, content: bytes) -> object:
    """Return the JSON of an answer. Raises AttemptFailed for a status other than 200, and for other content."""
    if status != 200:
        raise AttemptFailed(f"it answered {status}")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AttemptFailed("its answer is not JSON") from error


def chat_completions_url(url: str) -> str:
    """Return the URL of the chat completions of an endpoint. A host alone gets /v1; a path is used as it is.

    Example: "http://127.0.0.1:8700" -> "http://127.0.0.1:8700/v1/chat/completions"
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or "/v1"
    if not path.endswith("/chat/completions"):
        path += "/chat/completions"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def find_secret(endpoint: EndpointConfig, settings: Settings, *, is_policy_owned: bool) -> str | None:
    """Return the endpoint's API key, None if it needs none. Raises JobFailed when the secret is not configured.

    A secret `name@host` is sent to that host only. A plain `name` is sent anywhere, for endpoints of the deployment's
    own settings only: whoever may write a policy's rewards could otherwise have it sent to a host of their own.
    """
    if endpoint.key is None:
        return None
    bound_name = f"{endpoint.key}@{urlsplit(endpoint.url).hostname}"
    for name in (bound_name,) if is_policy_owned else (bound_name, endpoint.key):
        if name in settings.secrets:
            return settings.secrets[name].get_secret_value()
    raise JobFailed(f"ATTUNE_SECRETS has no '{bound_name}'" + ("" if is_policy_owned else f" and no '{endpoint.key}'"))


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections: reading the certificates of all authorities takes 30 ms."""
    return httpx2.create_ssl_context(trust_env=False)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Send guarded requests to public addresses or listed hosts only, all other requests anywhere."""

    def __init__(self, private_hosts: Collection[str]) -> None:
        self._private_hosts = {normalize_host(host) for host in private_hosts}
        self._open_transport = httpx2.AsyncHTTPTransport(verify=_tls_context(), trust_env=False)
        # Connections are pooled by address, and two names at one address must not share one.
        self._guarded_transport = httpx2.AsyncHTTPTransport(
            verify=_tls_context(), trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises JobFailed for an address that is not public."""
        host = request.url.host
        if not request.extensions.get(GUARDED) or normalize_host(host) in self._private_hosts:
            return await self._open_transport.handle_async_request(request)
        addresses = await resolve_public(host, request)
        request.extensions = {**request.extensions, "sni_hostname": host}
        for number, address in enumerate(addresses, 1):
            request.url = request.url.copy_with(host=address)
            try:
                return await self._guarded_transport.handle_async_request(request)
            except httpx2.ConnectError:
                if number == len(addresses):
                    raise
        raise AssertionError

    async def aclose(self) -> None:
        await self._open_transport.aclose()
        await self._guarded_transport.aclose()


async def resolve_public(host: str, request: httpx2.Request) -> list[str]:
    """Return the host's addresses. Raises JobFailed if one of them is not public."""
    try:
        results = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpx2.ConnectError("its name is not known", request=request) from error
    addresses = list(dict.fromkeys(str(result[4][0]) for result in results))
    if not addresses or not all(is_public(ipaddress.ip_address(one.partition("%")[0])) for one in addresses):
        raise JobFailed(NOT_PUBLIC)
    return addresses


def is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (embedded := _embedded_ipv4(address)) is not None:
        return is_public(embedded)
    if any(address in network for network in NOT_GLOBAL):
        return False
    return address.is_global and not address.is_multicast and address not in METADATA_ADDRESSES


def _embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which packets for this address are translated, if there is one."""
    if address in NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
