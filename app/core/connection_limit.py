"""The open connections of one address to an API process, which are limited before anything of them is read."""

from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network


def network_of(host: str) -> str:
    """Return an IPv4 address, or the first 64 bits of an IPv6 address, which one client may own."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address) >> 64 << 64, 64)).network_address)


class TrustedProxies:
    """The addresses and networks that uvicorn takes `X-Forwarded-For` from (FORWARDED_ALLOW_IPS); "*" is every one."""

    def __init__(self, hosts: str | Iterable[str]) -> None:
        names = [name.strip() for name in (hosts.split(",") if isinstance(hosts, str) else hosts)]
        self._names = set(names)
        self._networks: list[IPv4Network | IPv6Network] = []
        for name in names:
            try:
                self._networks.append(ip_network(name, strict=False))
            except ValueError:  # a name, such as that of a Unix socket
                continue

    def __contains__(self, host: str) -> bool:
        if "*" in self._names or host in self._names:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


class ConnectionLimit:
    """Counts the open connections of each network. Trusted proxies carry many clients, and have no limit."""

    def __init__(self, limit: int, proxies: TrustedProxies) -> None:
        self._limit, self._proxies = limit, proxies
        self._counts: Counter[str] = Counter()

    def admit(self, host: str) -> bool:
        """Count a new connection, which `release` must follow; return whether it may be used."""
        self._counts[network_of(host)] += 1
        return host in self._proxies or self._counts[network_of(host)] <= self._limit

    def release(self, host: str) -> None:
        network = network_of(host)
        self._counts[network] -= 1
        if not self._counts[network]:
            del self._counts[network]
