"""No request goes where none may go, however its address is written, or changes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import anyio
import pytest

from pgworkd.core.race import Failed
from pgworkd.errors import UsageError
from pgworkd.push import guard
from pgworkd.push.endpoint import Endpoint
from pgworkd.push.guard import AddressRefused, ConnectionFailed, Network, check_url, is_public

PUBLIC = ("1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2a00:1450:4001:829::200e")
PRIVATE = """
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255
    192.0.0.1 192.0.2.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1
    255.255.255.255 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe fe80::1 fe80::1%lo fc00::1
    fd00:ec2::254 fec0::1 ff02::1 ff0e::1 100::1 2001:db8::1 2001::1 2002:7f00:1:: 64:ff9b::7f00:1 64:ff9b::808:808
    64:ff9b:1::1 4000::1 localhost 1.2.3 2130706433
""".split()
DISGUISED = """
    127.0.0.1 127.1 127.0.1 2130706433 0x7f000001 0x7f.0.0.1 0177.0.0.1 017700000001 0 0.0 127.0.0.1. localhost
    LOCALHOST localhost. [::1] [::] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:7f00:1] 169.254.169.254
    2852039166 0xa9fea9fe 0251.0376.0251.0376 10.1 [::ffff:169.254.169.254] [::ffff:10.0.0.1] 192.168.257 100.64.0.1
    [fe80::1] [fd00:ec2::254] [64:ff9b::127.0.0.1] [2002:7f00:1::] [::127.0.0.1] 0x7f.1
""".split()


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_public_internet_are_allowed(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", [*PRIVATE, ""])
def test_no_other_address_is(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("host", DISGUISED)
async def test_an_address_in_disguise_is_refused_or_none(host: str) -> None:
    """As the system reads it: either it is judged as what it is, or it is no name at all."""
    url = check_url(f"http://{host}:8080/x", allow_private=True)
    with pytest.raises((AddressRefused, ConnectionFailed)):
        await Network().connect(url.hostname or "", url.port or 80)


@pytest.mark.parametrize("host", DISGUISED)
def test_an_address_in_disguise_is_refused_already_when_it_is_written(host: str) -> None:
    with pytest.raises(UsageError, match="is not of the public internet: give another host, or say allow_private"):
        check_url(f"http://{host}:8080/x")


class Names:
    """A name server that gives the next of its answers each time."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers, self.asked = list(answers), 0

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


class Tried:
    """Takes note of each address that is tried, in the place of the network; `dead` refuse, `silent` say nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, *, dead: str = "", silent: Sequence[str] = ()) -> None:
        self.addresses: list[str] = []
        self.dead, self.silent = dead, silent
        patch.setattr(guard, "_connected", self.connected)

    async def connected(self, address: str, _: int) -> socket.socket:
        self.addresses.append(address)
        if address in self.silent:
            await anyio.sleep_forever()
        if address == self.dead:
            raise Failed("no route")
        return socket.socket()


async def test_the_address_that_was_judged_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, names = Tried(monkeypatch), Names(["8.8.8.8"], ["127.0.0.1"])
    network = Network(resolve=names)
    (await network.connect("rebind.example.com", 443)).close()
    assert (names.asked, tried.addresses) == (1, ["8.8.8.8"])
    with pytest.raises(AddressRefused, match=r"rebind.example.com has the address 127\.0\.0\.1"):
        await network.connect("rebind.example.com", 443)
    assert tried.addresses == ["8.8.8.8"]


@pytest.mark.parametrize("place", range(3))
async def test_one_private_address_among_public_ones_is_enough(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, addresses = Tried(monkeypatch), ["8.8.8.8", "1.1.1.1"]
    addresses.insert(place, "169.254.169.254")
    with pytest.raises(AddressRefused):
        await Network(resolve=Names(addresses)).connect("mixed.example.com", 443)
    assert tried.addresses == []


async def test_an_address_that_does_not_answer_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, dead="8.8.8.8")
    (await Network(resolve=Names(["8.8.8.8", "1.1.1.1"])).connect("two.example.com", 443)).close()
    assert tried.addresses == ["8.8.8.8", "1.1.1.1"]
    with pytest.raises(ConnectionFailed, match="no route"):
        await Network(resolve=Names(["8.8.8.8"])).connect("dead.example.com", 443)


async def test_silent_addresses_are_not_waited_for_and_each_kind_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network without a route for IPv6 drops what is sent there; most names have addresses of both kinds."""
    silent = [f"2606:4700::{n}" for n in range(1, 8)]
    tried, began = Tried(monkeypatch, silent=silent), anyio.current_time()
    (await Network(resolve=Names([*silent, "8.8.8.8", "1.1.1.1"])).connect("both.example.com", 443)).close()
    assert tried.addresses == [silent[0], "8.8.8.8"]
    assert anyio.current_time() - began < guard.CONNECT_S_MAX / 2


async def test_a_name_that_cannot_be_looked_up_is_no_connection() -> None:
    with pytest.raises(ConnectionFailed, match=r"nowhere\.invalid cannot be looked up"):
        await Network().connect("nowhere.invalid", 443)
    with pytest.raises(ConnectionFailed, match="has no address"):
        await Network(resolve=Names([])).connect("empty.example.com", 443)


WRONG = {
    "ftp://example.com": "begins with 'ftp'",
    "file:///etc/passwd": "begins with 'file'",
    "gopher://example.com": "begins with 'gopher'",
    "javascript:alert(1)": "begins with 'javascript'",
    "HTTPS://example.com/": "'HTTPS://': write https:// in lower case",
    "Http://example.com/": "write http:// in lower case",
    "//example.com/x": "begins with ''",
    "example.com/x": "begins with ''",
    "": "begins with ''",
    "https://user:pass@example.com": "user or password",
    "https://user@example.com": "user or password",
    "https://1.1.1.1@127.0.0.1/": "user or password",
    "https://:@example.com": "user or password",
    "https:///path": "no host",
    "https://": "no host",
    "https://example.com/#part": "fragment",
    "https://example.com/#": "fragment",
    "https://example.com:25/": "port 25",
    "https://example.com:22/": "port 22",
    "https://example.com:0/": "port 0",
    "https://example.com:99999/": "cannot be read",
    "https://example.com:x/": "cannot be read",
    "https://[::1/": "cannot be read",
    "https://exa mple.com/": "printable ASCII",
    "https://example.com\\@127.0.0.1/": "printable ASCII",
    "https://example.com/\r\nHost: x": "printable ASCII",
    "https://bücher.example/": "printable ASCII",
    "https://example.com/\x00": "printable ASCII",
    f"https://example.com/{'x' * 2000}": "2,000 characters",
}


@pytest.mark.parametrize("url", WRONG, ids=lambda url: ascii(url[:30]))
def test_a_wrong_url_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(UsageError, match=WRONG[url]):
        check_url(url)


@pytest.mark.parametrize("url", ["/{kinds}", "/{kind", "/}", "/{}", "/?a={Queue}", "/{{id}}"])
def test_braces_that_stand_for_nothing_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"\{queue\}, \{kind\} and \{id\} are filled in"):
        Endpoint(name="e", url=f"https://example.com{url}", unsigned=True)
    with pytest.raises(UsageError, match="host has a brace"):
        Endpoint(name="e", url="https://{queue}.example.com/", unsigned=True)


def test_urls_that_are_allowed() -> None:
    for url in (
        "https://example.com",
        "http://example.com:8080/a%20b?c=d&e",
        "https://[2606:4700::1111]:8443/x",
        "https://8.8.8.8/",
        "https://localhost.example.com/",
        "https://notlocalhost/",
    ):
        assert check_url(url).geturl() == url
    assert check_url("http://10.0.0.1:25/", allow_private=True).port == 25
