"""Where a question may go: what a project's admin names leads to public addresses, or to hosts that are listed.

The name is resolved once, and the connection goes to the very address that was looked at: an answer that changes
between two look-ups (DNS rebinding) gains nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address

import httpx2

from workers.judging.request import Broken

GUARDED = "attune_guarded"  # of a request's extensions
NOT_PUBLIC = "its host is in no public network, and ATTUNE_PRIVATE_HOSTS does not list it"
METADATA = {ipaddress.ip_address("168.63.129.16")}  # a cloud's own service at a public address
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not told by every Python: protocol assignments (a cloud's metadata among them), NAT64 of one's own, site-local
# addresses, IPv4 in IPv6 of two old kinds, segment routing.
NOT_GLOBAL = [
    ipaddress.ip_network(net)
    for net in ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10", "::/96", "::ffff:0:0:0/96", "5f00::/16")
]


class Doors(httpx2.AsyncBaseTransport):
    """Guarded requests go to public addresses, or to hosts that are listed; all others wherever they like."""

    def __init__(self, private_hosts: Collection[str]) -> None:
        self._listed = {plain(host) for host in private_hosts}
        self._free = httpx2.AsyncHTTPTransport(trust_env=False)
        # A connection is kept by its address, and two names at one address must not share one.
        self._once = httpx2.AsyncHTTPTransport(trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises Broken for an address that is not public."""
        host = request.url.host
        if not request.extensions.get(GUARDED) or plain(host) in self._listed:
            return await self._free.handle_async_request(request)
        addresses = await public(host, request)
        request.extensions = {**request.extensions, "sni_hostname": host}
        for number, address in enumerate(addresses, 1):
            request.url = request.url.copy_with(host=address)
            try:
                return await self._once.handle_async_request(request)
            except httpx2.ConnectError:
                if number == len(addresses):
                    raise
        raise AssertionError

    async def aclose(self) -> None:
        await self._free.aclose()
        await self._once.aclose()


def plain(host: str) -> str:
    """Example: "Judge.Internal." -> "judge.internal\""""
    return host.strip("[]").rstrip(".").lower()


async def public(host: str, request: httpx2.Request) -> list[str]:
    """The host's addresses. One that is not public is enough to refuse them all."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpx2.ConnectError("its name is not known", request=request) from error
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    if not addresses or not all(is_public(ipaddress.ip_address(one.partition("%")[0])) for one in addresses):
        raise Broken(NOT_PUBLIC)
    return addresses


def is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (inner := _inside(address)) is not None:
        return is_public(inner)
    if any(address in network for network in NOT_GLOBAL):
        return False
    return address.is_global and not address.is_multicast and address not in METADATA


def _inside(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to this one end at."""
    if address in NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
