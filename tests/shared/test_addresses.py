"""An address without a port, which gRPC would dial on 443, is refused."""

from __future__ import annotations

import pytest

from shared.addresses import address_problems


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:50051", "target:50051", "target.example:1", "[::1]:65535", "[fe80::1%e0]:9"),
        *("dns:target:50051", "dns:///target:50051", "dns://8.8.8.8/target:50051"),
        *("ipv4:10.0.0.1:50051,10.0.0.2:50051", "ipv6:[::1]:50051"),
        *("unix:run/target.sock", "unix:///run/target.sock", "unix-abstract:target", "vsock:2:9"),
    ],
)
def test_what_names_a_port_or_needs_none_is_taken(address: str) -> None:
    assert address_problems("--target", [address]) == ()


@pytest.mark.parametrize(
    "address",
    [
        *("", "target", "127.0.0.1", "::1", "[::1]", "target:", ":50051", "target:http"),
        *("target:0", "target:65536", "target:50051/", "http://target:50051", "a:1,b:2", "a:1 "),
        *(
            "dns:target",
            "dns:50051",
            "dns:///target",
            "ipv4:10.0.0.1",
            "ipv4:10.0.0.1:9,10.0.0.2",
            "unix:",
        ),
    ],
)
def test_what_would_be_dialled_elsewhere_is_named(address: str) -> None:
    [problem] = address_problems("--target", ["good:1", address])
    assert problem.startswith(f"--target is {address!r}; it must be HOST:PORT")
