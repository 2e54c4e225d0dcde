"""The parts of a source's URL and the addresses of its host, validated against SSRF.

The API server has matched the URL against a pattern. The pod does not rely on that: it matches the
form again, checks percent-encoded parts after decoding, and resolves the host once, so that
connections go to the checked addresses. Link-local addresses and the metadata addresses of clouds
are refused in every notation, because they return the credentials of the node.
"""

import ipaddress
import re
import socket
import urllib.request
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit

from torchrun_api.kinds.workspace import (
    GIT_URL,
    GIT_URL_FORMS,
    S3_ENDPOINT,
    S3_URL,
    S3_URL_FORMS,
)
from torchrun_runtime.sync.errors import SyncError

# What messages call the source of a host.
URL_FIELD = "volumes.workspace.url"
ENDPOINT_FIELD = "AWS_ENDPOINT_URL of the Secret"
_LONGEST_URL = 2048
_DEFAULT_PORTS = {"https": 443, "http": 80, "ssh": 22, "s3": 443}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Metadata services that are not link-local: Azure, Alibaba, Oracle; AWS and Google over IPv6.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
)
# Prefixes whose last 32 bits are an IPv4 address: NAT64 (RFC 6052), translated (RFC 2765) and
# compatible ones (RFC 4291).
_IPV4_AT_THE_END = tuple(
    ipaddress.ip_network(text) for text in ("64:ff9b::/96", "::ffff:0:0:0/96", "::/96")
)
# NAT64 for local use (RFC 8215). Each network chooses its own length of the prefix, and with it the
# place of the IPv4 address, so that an address leads to different hosts in different networks.
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_LOOPBACK = ipaddress.ip_address("::1")


@dataclass(frozen=True)
class Location:
    """A checked URL. path: decoded, without its first slash."""

    url: str
    scheme: str
    user: str
    host: str
    port: int
    path: str

    @property
    def display_name(self) -> str:
        """The URL for messages and logs, without user and query."""
        default = self.port == _DEFAULT_PORTS[self.scheme]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if default else f':{self.port}'}/{self.path}"


def parse_git(url: str) -> Location:
    """Raises SyncError (InvalidSource), permanent."""
    return _parse(url, GIT_URL, GIT_URL_FORMS)


def parse_s3(url: str) -> Location:
    """Raises SyncError (InvalidSource), permanent."""
    return _parse(url, S3_URL, S3_URL_FORMS)


def parse_endpoint(url: str) -> Location:
    """The endpoint of a Secret. Raises SyncError (SecretInvalid), not permanent."""
    return _parse(url, S3_ENDPOINT, "https://ENDPOINT", ENDPOINT_FIELD)


def _parse(url: str, pattern: str, accepted: str, field: str = URL_FIELD) -> Location:
    def invalid(why: str) -> SyncError:
        message = f"{field} {shown_url(url)} is invalid: {why}."
        if field == ENDPOINT_FIELD:
            return SyncError("SecretInvalid", message, permanent=False)
        return SyncError("InvalidSource", message, permanent=True)

    if len(url) > _LONGEST_URL or not re.fullmatch(pattern, url):
        raise invalid(f"it must be {accepted}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        path = unquote_to_bytes(parts.path).decode()
    except UnicodeDecodeError:
        raise invalid("its path is not UTF-8") from None
    except ValueError as error:
        raise invalid(str(error)) from None
    if port == 0:
        raise invalid("its port must be between 1 and 65535")
    if not path.isprintable() or "\\" in path:
        raise invalid("it has control characters or backslashes in its path")
    if "::" in path or any(part in (".", "..") for part in path.split("/")):
        raise invalid("it has '::', or '.' or '..' as a component of its path")
    return Location(
        url=url,
        scheme=parts.scheme,
        user=parts.username or "",
        host=host,
        port=port or _DEFAULT_PORTS[parts.scheme],
        path=path.removeprefix("/"),
    )


def shown_url(url: str) -> str:
    """Return a URL for messages and logs: without user, password and query."""
    bare = re.sub(r"//[^/]*@", "//", url.partition("?")[0].partition("#")[0])
    bare = re.sub(r"^[^/]*@", "", bare)
    return ascii(bare if len(bare) <= 200 else bare[:200] + "...")


def resolve(host: str, port: int, field: str = URL_FIELD) -> tuple[str, ...]:
    """Addresses of the host, in the order of the resolver. All of them are permitted.

    field: where the host is from, for messages. Raises SyncError: FetchFailed, which is temporary,
    or ForbiddenAddress, which is permanent unless the host is from a Secret.
    """
    try:
        records = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"Host {host!a} of {field} cannot be resolved: {error}."
        raise SyncError("FetchFailed", message, permanent=False) from None
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in records))
    for text in addresses:
        if is_forbidden(ipaddress.ip_address(text.partition("%")[0])):
            message = (
                f"Host {host!a} of {field} has the address {text}, which is not"
                " allowed: it is link-local, multicast, unspecified, a metadata service or in"
                f" {_LOCAL_NAT64}. Use another host."
            )
            raise SyncError("ForbiddenAddress", message, permanent=field == URL_FIELD)
    return addresses


def https_proxy(host: str, port: int) -> str:
    """URL of the proxy for the host by the pod's HTTPS_PROXY and NO_PROXY; "" for none."""
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass(f"{host}:{port}", proxies):
        return ""
    return proxies.get("https") or proxies.get("all") or ""


def resolve_literal(host: str, port: int) -> None:
    """Check a host that is an address. A name is not checked: only the proxy can resolve it.

    Raises SyncError (ForbiddenAddress).
    """
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return
    resolve(host, port)


def is_forbidden(address: _Address) -> bool:
    """Whether fetches from the address are forbidden, in any notation."""
    if isinstance(address, ipaddress.IPv6Address) and any(map(is_forbidden, _inner(address))):
        return True
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.version == 4 and (address.is_reserved or int(address) >> 24 == 0))
        or address in _METADATA
        or address in _LOCAL_NAT64
    )


def _inner(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address may lead to."""
    embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address != _LOOPBACK and any(address in network for network in _IPV4_AT_THE_END):
        embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [inner for inner in embedded if inner is not None]
