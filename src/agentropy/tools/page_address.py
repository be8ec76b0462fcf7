"""Which addresses a model may have fetched: http and https, usual ports, names and numbers of the public internet.

The check of numbers is what protects; it is made on the very addresses that are then connected to (`page_fetch`). The
check of the URL only refuses early, and with a better reason.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The numeric addresses of a host name."""
Permit = frozenset[tuple[str, int]]

PORTS = {"http": 80, "https": 443}
MAX_URL = 2000


class Refused(Exception):
    """An address that is not fetched; the message is for the model."""


class Failed(Exception):
    """A page that could not be had; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page as the server sent it. url: where redirects ended; kind: the Content-Type header."""

    url: str
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. host: a name or a number in ASCII, without brackets; path: with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_url(url: str, permit: Permit = frozenset()) -> Target:
    """The parts of a URL. Raises Refused for what is no public web address by its looks.

    permit: (address, port) pairs that are let through all checks.
    """
    url = url.strip(" \t\r\n")
    if len(url) > MAX_URL:
        raise Refused(f"the address has more than {MAX_URL} characters")
    # Parsers disagree on what these mean, and an attacker lives on the difference.
    if any(c.isspace() or not c.isprintable() for c in url) or "\\" in url:
        raise Refused("the address has spaces, backslashes or control characters in it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise Refused("the address is not a valid URL") from None
    if parts.scheme not in PORTS:
        raise Refused("only http:// and https:// addresses can be read")
    if "@" in parts.netloc:
        raise Refused("an address with a user name in it is not read")
    host = _host(host, bracketed="[" in parts.netloc)
    port = PORTS[parts.scheme] if port is None else port
    if (host, port) not in permit:
        if port not in PORTS.values():
            raise Refused(f"port {port} is not read; web pages are on ports 80 and 443")
        _check_name(host)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]")
    return Target(parts.scheme, host, port, f"{path}?{query}" if query else path)


def _host(host: str, bracketed: bool) -> str:
    if bracketed:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise Refused("the address is not a valid URL") from None
    if not host.isascii():
        import idna

        try:
            # UTS 46 turns full-width digits and dots into ASCII, as a browser would: they are seen by the checks then.
            host = idna.encode(host, uts46=True).decode()
        except (idna.IDNAError, UnicodeError):
            raise Refused("the address has no valid host name") from None
    host = host.lower().removesuffix(".")
    if len(host) > 253 or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", host):
        raise Refused("the address has no valid host name")
    return host


_NUMERIC = re.compile(r"\d+|0x[0-9a-f]*")
_LOCAL = (
    "localhost",
    "localdomain",
    "local",
    "internal",
    "intranet",
    "lan",
    "home",
    "corp",
    "private",
    "test",
    "onion",
)


def _check_name(host: str) -> None:
    if ":" in host or _NUMERIC.fullmatch(host.rpartition(".")[2]):
        try:
            number = ipaddress.ip_address(host)
        except ValueError:  # octal, hexadecimal, fewer than four parts
            raise Refused("the address writes an IP number in an unusual way") from None
        check_public(number)
    elif "." not in host or host.rpartition(".")[2] in _LOCAL or host.endswith(".home.arpa"):
        raise Refused(f"{host} is not a public name")


def check_public(address: Address) -> None:
    """Raises Refused unless the address is one of the public internet."""
    if not is_public(address):
        raise Refused(f"{address} is not a public address")


_NOT_PUBLIC_4 = [
    ipaddress.IPv4Network(n)
    for n in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host agent, reached from within
        "169.254.0.0/16",  # link-local, and clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = [
    ipaddress.IPv6Network(n)
    for n in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address within, which its relay would connect to
        "3fff::/20",  # documentation
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet (IANA's special-purpose registries, read strictly)."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in n for n in _NOT_PUBLIC_4)
    if address.scope_id is not None:
        return False
    if address in _NAT64:  # on a network without IPv4, every name resolves to one of these
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _PUBLIC_6 and not any(address in n for n in _NOT_PUBLIC_6)
