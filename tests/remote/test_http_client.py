"""The HTTP client against bytes on a socket, and waits with a name."""

import asyncio
import logging
import socket
import threading

import pytest

from rft import redaction, waits
from rft.remote.http_client import BadResponse, RequestFailed, RequestRefused, ServerClient, deadline, key_named
from rft.remote.server_process import free_port
from rft.waits import Reminder, waiting
from tests.conftest import SOON_S


@pytest.fixture
def says():
    """A server that sends these bytes to every client; returns its peer and what it was sent."""
    servers = []

    def listen(*answers):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        told = []

        def answer():
            for data in answers:
                connection, _ = server.accept()
                with connection:
                    text = b""
                    while b"\r\n\r\n" not in text or (text.startswith(b"POST") and not text.endswith(b"}")):
                        text += connection.recv(65536)
                    told.append(text.decode())
                    connection.sendall(data)

        threading.Thread(target=answer, daemon=True).start()
        return ServerClient.at(3, f"127.0.0.1:{server.getsockname()[1]}"), told

    yield listen
    for server in servers:
        server.close()


def test_a_post_is_what_a_server_expects(says):
    peer, told = says(b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\nX: y\r\n\r\n{"a": [1]}and more')
    assert asyncio.run(peer.post("/p?q=1", {"x": "ü"})) == {"a": [1]}
    head, _, body = told[0].partition("\r\n\r\n")
    assert head.splitlines()[0] == "POST /p?q=1 HTTP/1.1" and body == '{"x": "\\u00fc"}'
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    assert fields == {
        "Host": f"127.0.0.1:{peer.port}",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n\r\n[1, 2]",
        b"HTTP/1.1 201 Created\r\nContent-Length: 6\r\n\r\n[1, 2]",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\n[1,\r\n3;x=y\r\n 2]\r\n0\r\n\r\n",
    ],
)
def test_answers_come_in_several_forms(says, data):
    peer, _ = says(data)
    assert asyncio.run(peer.get("/")) == [1, 2]


def test_an_empty_answer_is_none(says):
    peer, _ = says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert asyncio.run(peer.get("/")) is None


def test_a_long_answer_is_read_whole(says):
    body = b"[" + b"1," * 200_000 + b"1]"
    peer, _ = says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert len(asyncio.run(peer.get("/"))) == 200_001


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", RequestFailed),
        (b"HTTP/1.1 200 OK\r\nContent-Le", RequestFailed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[1]", RequestFailed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n[1]", BadResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", BadResponse),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, BadResponse),
        (b"nonsense\r\n\r\n", BadResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1,", BadResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd", BadResponse),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", RequestRefused),
    ],
)
def test_anything_else_is_an_error_that_names_the_server_and_the_call(says, data, kind):
    peer, _ = says(data)
    with pytest.raises(RequestFailed, match=rf"^server 3 \(127\.0\.0\.1:{peer.port}\): ") as caught:
        asyncio.run(peer.get("/path"))
    assert type(caught.value) is kind
    if kind is RequestRefused:
        assert "GET /path: status 404: nope" in str(caught.value) and not caught.value.busy


@pytest.mark.parametrize(("status", "busy"), [(429, True), (503, True), (500, False)])
def test_a_server_may_be_busy(says, status, busy):
    peer, _ = says(b"HTTP/1.1 %d Some\r\nContent-Length: 0\r\n\r\n" % status)
    with pytest.raises(RequestRefused) as caught:
        asyncio.run(peer.get("/"))
    assert caught.value.busy == busy


def test_a_refusal_is_quoted_in_one_line_without_codes_of_a_terminal(says):
    peer, _ = says(b"HTTP/1.1 500 Some\r\nContent-Length: 9\r\n\r\n\x1b[31mno\n\xff")
    with pytest.raises(RequestRefused, match=r"status 500:  \[31mno \ufffd$"):
        asyncio.run(peer.get("/"))


def test_a_value_at_which_an_answer_is_cut_is_redacted_before(says, monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", {"sk-2718281828": "${oc.env:KEY}"})
    body = b"x" * 496 + b"sk-2718281828"
    peer, _ = says(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(RequestRefused, match=r"status 401: x{496}\$\{oc$"):
        asyncio.run(peer.get("/"))
    body = b"x" * 76 + b"sk-2718281828"
    peer, _ = says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(BadResponse, match=r"not JSON: 'x{76}\$\{oc'$"):
        asyncio.run(peer.get("/"))


def test_halves_of_characters_in_an_answer_are_replaced(says):
    body = b'{"a": ["\\ud800", "\\ud83d\\ude00", "\xed\x95\x9c"]}'
    peer, _ = says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert asyncio.run(peer.get("/")) == {"a": ["�", "\U0001f600", "한"]}


def test_nobody_listens():
    with pytest.raises(RequestFailed, match=r"server 0 \(127.0.0.1:\d+\): GET /: .*Connect call failed"):
        asyncio.run(ServerClient.at(0, f"127.0.0.1:{free_port()}").get("/"))
    with pytest.raises(RequestFailed, match=r"server 0 \(no\.such\.host\.invalid:80\): GET /: "):
        asyncio.run(ServerClient.at(0, "no.such.host.invalid:80").get("/"))


def test_a_call_that_is_given_up_closes_its_connection():
    gone = threading.Event()

    async def main():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.read() == b""
            gone.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        peer = ServerClient.at(0, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.get("/"), 0.2)
        await asyncio.to_thread(gone.wait, 5)

    asyncio.run(main())
    assert gone.is_set()


def test_what_an_answer_lacks_is_garbage():
    peer = ServerClient.at(1, "a:2")
    with (
        pytest.raises(BadResponse, match=r"^server 1 \(a:2\): its version cannot be read: KeyError\('x'\)"),
        peer.parse("its version"),
    ):
        {}["x"]


@pytest.mark.parametrize("said", [True, False])
def test_a_wait_has_a_deadline_and_a_name_and_is_said_where_it_has_a_reminder(said, caplog, monkeypatch):
    monkeypatch.setattr("rft.waits.SAY_AFTER_S", 0.05)

    async def wait():
        reminder = Reminder() if said else None
        async with deadline("rank 3 waits for server 2 to acknowledge version 17", 0.18, reminder):
            await asyncio.sleep(5)

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TimeoutError, match=r"^rank 3 waits for server 2 to acknowledge version 17, 0.18 s$"),
    ):
        asyncio.run(wait())
    assert set(caplog.messages) == ({"rank 3 waits for server 2 to acknowledge version 17, 0 s"} if said else set())


@pytest.fixture
def no_waits_before(monkeypatch):
    monkeypatch.setattr(waits, "_due", {})
    yield
    for thread in threading.enumerate():
        if thread.name == "wait":
            thread.join(SOON_S)
            assert not thread.is_alive()


def test_a_wait_is_said_each_time_when_it_has_lasted_twice_as_long(caplog, no_waits_before):
    reminder, moments = Reminder(), []
    for _ in range(4):
        moments.append(reminder.after_s)
        reminder.say("rank 0 waits for server 1", reminder.after_s)
    assert moments == [10, 20, 40, 80] and Reminder().after_s == 10
    assert caplog.messages == [f"rank 0 waits for server 1, {seconds} s" for seconds in (10, 20, 40, 80)]


def test_of_usual_waits_one_that_is_longer_than_those_before_is_said(no_waits_before):
    first = Reminder("samples")
    first.say("the samples of step 1", 10.0)
    first.postpone()
    assert (Reminder("samples").after_s, Reminder("ranks").after_s, Reminder().after_s) == (40, 10, 10)


def test_a_block_that_waits_is_said_while_it_waits(caplog, monkeypatch, no_waits_before):
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.01)
    said = threading.Event()

    def what():
        said.set()
        return f"{len(caplog.messages)} lines before"

    with waiting(what):
        assert said.wait(SOON_S)
    assert set(caplog.messages) <= {f"{number} lines before, 0 s" for number in range(20)}


def test_a_block_that_does_not_wait_long_has_no_line(caplog, no_waits_before):
    for _ in range(3):
        with waiting("the run waits for nothing"):
            pass
    assert caplog.messages == []


def test_a_wait_leaves_other_errors_as_they_are():
    async def wait():
        async with deadline("it", 5):
            raise TimeoutError("another")

    with pytest.raises(TimeoutError, match=r"^another$"):
        asyncio.run(wait())


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://a:1", "http://a:port"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match=rf"^teacher 1: {url} is not a URL: "):
        ServerClient("teacher 1", url)


def test_proxies_of_the_environment_are_used_on_request_alone(says, monkeypatch):
    proxy, got = says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1")
    server, direct = says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url = f"http://127.0.0.1:{server.port}"
    assert asyncio.run(ServerClient("judge", f"{url}/v1/", {"Authorization": "x"}, use_proxies=True).get("/a")) == 1
    assert f"GET {url}/v1/a HTTP/1.1" in got[0] and "Authorization: x" in got[0]
    assert asyncio.run(ServerClient("server", url).get("/a")) == 2 and "GET /a HTTP/1.1" in direct[0]


def test_many_calls_run_at_once():
    """More than the connections that the library's client has by default."""
    present, most = 0, 0

    async def main():
        nonlocal present, most
        everyone = asyncio.Event()

        async def serve(reader, writer):
            nonlocal present, most
            await reader.readuntil(b"\r\n\r\n")
            present += 1
            most = max(most, present)
            if present == 150:
                everyone.set()
            await everyone.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=200) as server:
            client = ServerClient.at(0, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with asyncio.timeout(30):
                assert await asyncio.gather(*[client.get("/") for _ in range(150)]) == [1] * 150

    asyncio.run(main())
    assert most == 150


def test_requests_are_not_logged(says, caplog):
    client, _ = says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1")
    with caplog.at_level(logging.INFO):
        asyncio.run(client.get("/"))
    assert not caplog.messages


def test_time_may_cure_a_server_that_is_busy_or_fails_but_not_a_wrong_request():
    assert all(RequestRefused("", status).transient for status in (408, 409, 429, 500, 503))
    assert not any(RequestRefused("", status).transient for status in (400, 401, 404, 413, 422))
    assert RequestFailed("").transient and BadResponse("").transient


def test_the_key_that_an_option_names_is_in_no_message(monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", {})
    monkeypatch.setenv("RFT_T_KEY", "sk-31415\n")
    assert key_named("RFT_T_KEY", "teacher") == "sk-31415\n" and key_named(None, "teacher") is None
    assert redaction.redact("Illegal header value b'Bearer sk-31415\\n'") == (
        "Illegal header value b'Bearer ${oc.env:RFT_T_KEY}'"
    )
    with pytest.raises(ValueError, match=r"^teacher\.token=RFT_T_NONE: there is no such environment variable"):
        key_named("RFT_T_NONE", "teacher")
