"""A web server with limits, and clients that send half a request, too much, or leave."""

import logging
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from fastapi import FastAPI, Request

from rft.remote.http_limits import HttpLimits
from rft.remote.http_server import make_server, read_body
from tests.conftest import SOON_S

LIMITS = {"body_mib": 1e-4, "request_s": 0.5, "connections": 8}  # 104 bytes
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


@contextmanager
def serving(**changes):
    """A server that answers with the size of a body, once `go` is set."""
    app, limits, go = FastAPI(), HttpLimits(**LIMITS | changes), threading.Event()

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await read_body(request, limits, "the.key"))

    @app.post("/late")
    def late() -> int:
        return int(go.wait(SOON_S))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(app, limits, lifespan="off", timeout_graceful_shutdown=1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname(), go
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def client(address, sent=b""):
    with socket.create_connection(address, SOON_S) as line:
        line.sendall(sent)
        yield line


def read(line, end=b""):
    """What the server sends, up to `end` or until it closes the connection."""
    found = b""
    while (not end or end not in found) and (part := line.recv(65536)):
        found += part
    return found.decode()


HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + b"\r\nab",
    "half a second request": HEAD + b"\r\nabcd" + HEAD,
    "a body that is refused": b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab",
}


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_does_not_arrive_is_refused_and_its_connection_closed(half):
    with serving() as (address, _), client(address, HALVES[half]) as line:
        said = read(line)
    refused = "HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    if half == "a body that is refused":  # its answer was complete before
        assert said.startswith("HTTP/1.1 404") and "408" not in said
    else:
        assert said.endswith(refused) and said.count("HTTP/1.1 ") == (2 if "second" in half else 1)


def test_an_answer_may_take_longer_and_a_connection_may_rest():
    whole = HEAD + b"\r\nabcd"
    with serving() as (address, go), client(address, whole) as resting, client(address) as half:
        assert read(resting, b"\r\n\r\n4").startswith("HTTP/1.1 200")
        with client(address, whole.replace(b" / ", b" /late ")) as waiting:
            assert read(half).startswith("HTTP/1.1 408")
            with client(address) as later:  # opened after the request that waits
                assert read(later).startswith("HTTP/1.1 408")
            go.set()
            assert read(waiting, b"\r\n\r\n1").startswith("HTTP/1.1 200")
        resting.sendall(whole)
        assert read(resting, b"\r\n\r\n4").startswith("HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 300000000\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"40\r\n" + b"x" * 64 + b"\r\n40\r\n" + b"x" * 64 + b"\r\n",
    ],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_complete(sent):
    start = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    with serving(request_s=SOON_S) as (address, _), client(address, start + sent) as line:
        said = read(line, b"}")
    assert said.startswith("HTTP/1.1 413") and "a request may have 0.0001 MiB (the.key)" in said


def test_a_client_that_sends_all_of_a_large_body_first_reads_why_it_is_refused():
    size = 32 * 2**20  # more than the buffers of a connection hold
    head = f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
    with serving(request_s=SOON_S) as (address, _), client(address, head + bytes(size)) as line:
        assert read(line).startswith("HTTP/1.1 413")


def test_more_connections_than_the_limit_are_refused():
    with serving(connections=2, request_s=SOON_S) as (address, _), client(address), client(address) as second:
        with client(address) as third:
            assert read(third).startswith("HTTP/1.1 503")
        second.sendall(HEAD + b"\r\nabcd")
        assert read(second, b"\r\n\r\n4").startswith("HTTP/1.1 200")


def test_a_client_that_leaves_is_one_line_of_the_log(caplog):
    with serving(request_s=SOON_S) as (address, _), caplog.at_level(logging.WARNING):
        with client(address, HEAD + b"\r\nab"):
            pass
        deadline = time.monotonic() + SOON_S
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == [
        "/: a client has left before its request was complete"
    ]
    assert caplog.records[0].exc_info is None
