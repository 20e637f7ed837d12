"""Which hosts may be called: a URL that a project configures leads to public addresses, or to hosts that are listed.

The name is resolved once, and the connection goes to exactly the address that was checked. A name server that changes
its answer between two look-ups (DNS rebinding) gains nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address

import httpx2

from workers.queue.leased_job import JobFailed

GUARDED = "attune_guarded"  # key of a request's extensions
NOT_PUBLIC = "its host is in no public network, and ATTUNE_PRIVATE_HOSTS does not list it"
METADATA_ADDRESSES = {ipaddress.ip_address("168.63.129.16")}  # a cloud's own service at a public address
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not every Python version knows these: protocol assignments (a cloud's metadata among them), local NAT64, site-local
# addresses, two old forms of IPv4 in IPv6, segment routing.
NOT_GLOBAL = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10", "::/96", "::ffff:0:0:0/96", "5f00::/16")
]


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Send guarded requests to public addresses or listed hosts only, all other requests anywhere."""

    def __init__(self, private_hosts: Collection[str]) -> None:
        self._private_hosts = {normalize_host(host) for host in private_hosts}
        self._open_transport = httpx2.AsyncHTTPTransport(trust_env=False)
        # Connections are pooled by address, and two names at one address must not share one.
        self._guarded_transport = httpx2.AsyncHTTPTransport(
            trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
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


def normalize_host(host: str) -> str:
    """Example: "Judge.Internal." -> "judge.internal\""""
    return host.strip("[]").rstrip(".").lower()


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
