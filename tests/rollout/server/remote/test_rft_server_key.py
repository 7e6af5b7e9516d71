"""A request without the key of a server gets status 401 at every path."""

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rft.remote.http_client import bearer
from rft.rollout.server.remote.rft_server_key import KEY_VARIABLE, RequireKey

KEY = "a-key"


@pytest.fixture
def client(monkeypatch):
    """An application of which one path is for developers, behind the key."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    app = FastAPI()
    app.add_middleware(RequireKey)
    app.post("/collective_rpc")(lambda: {"done": True})
    app.get("/health")(lambda: {})

    @app.websocket("/line")
    async def line(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")

    with TestClient(app) as made:
        yield made


@pytest.mark.parametrize("given", [None, "another", "", f"{KEY}x", "é"])
def test_a_request_with_another_key_is_refused(client, given):
    headers = {name: value.encode() for name, value in bearer(given).items()}
    for response in (client.get("/health", headers=headers), client.post("/collective_rpc", headers=headers)):
        assert (response.status_code, response.json()) == (401, {"error": "this server needs another bearer token"})
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/line", headers=headers):
        pass


def test_a_request_with_the_key_passes(client):
    assert client.post("/collective_rpc", headers=bearer(KEY)).json() == {"done": True}
    with client.websocket_connect("/line", headers=bearer(KEY)) as line:
        assert line.receive_text() == "hello"


def test_a_server_without_a_key_needs_none(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    app = FastAPI()
    app.add_middleware(RequireKey)
    app.get("/health")(lambda: {})
    assert TestClient(app).get("/health").status_code == 200
