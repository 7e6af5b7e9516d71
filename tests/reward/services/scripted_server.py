"""A real HTTP server of this process for rewards, whose answers a script spoils. What it answers is otherwise right."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def right(text):
    """The true score of a text, which a fault must not change."""
    return (sum(text.encode()) % 997) / 16 - 20.0


def right_answer(body):
    """The answer of a server of mode=serve with the term `a`."""
    results = [
        {"total": right(text), "terms": {"a": right(text)}, "unscored": {}, "numbers": {"a/letters": len(text)}}
        for text in body["responses"]
    ]
    return {"id": body["id"], "fingerprint": "f", "count": len(results), "results": results}


def lie(answer, fault):
    """The same answer, spoiled."""
    results = answer["results"]
    if fault == "fewer":
        return answer | {"results": results[:-1]}
    if fault == "more":
        return answer | {"results": [*results, results[0]]}
    if fault == "count":
        return answer | {"count": len(results) + 1}
    if fault == "other_request":
        return answer | {"id": "0123456789abcdef"}
    if fault == "other_options":
        return answer | {"fingerprint": "g"}
    if fault == "no_results":
        return {"id": answer["id"], "count": answer["count"]}
    if fault == "list":
        return results
    value = {"string": "1.0", "bool": True, "nan": float("nan"), "infinite": 1e999, "object": {}, "huge": 10**400}[
        fault
    ]
    spoiled = results[0] | {"total": value, "terms": {"a": value}}
    return answer | {"results": [spoiled, *results[1:]]}


LIES = (
    *("fewer", "more", "count", "other_request", "other_options", "no_results", "list"),
    *("string", "bool", "nan", "infinite", "object", "huge"),
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        if server.token is not None and self.headers["Authorization"] != f"Bearer {server.token}":
            self.say(401, json.dumps({"detail": "another token"}).encode())
        else:
            self.say(200, json.dumps({"ready": True, "terms": server.terms, "sum": "f", "rows": 64}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, body, self.headers["Authorization"]))
            fault = server.script(len(server.requests))
        if fault == "hang":
            server.over.wait(5.0)
            self.close_connection = True
        elif fault == "die":
            self.close_connection = True
        elif isinstance(fault, int):
            self.say(fault, b'{"detail": "out of order"}')
        elif fault == "slow":
            time.sleep(0.02)
            self.say(200, json.dumps(server.answer(body)).encode())
        elif fault == "half_json":
            whole = json.dumps(server.answer(body)).encode()
            self.say(200, whole[: len(whole) // 2])
        elif fault == "cut":
            self.cut(json.dumps(server.answer(body)).encode())
        elif fault == "no_http":
            self.wfile.write(b"hello\r\n\r\n")
            self.close_connection = True
        else:
            answer = server.answer(server.requests[0][1] if fault == "swapped" else body)
            self.say(200, json.dumps(answer if fault in (None, "swapped") else lie(answer, fault)).encode())

    def say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def cut(self, text):
        """The head of a whole answer, and half of its body."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[: len(text) // 2])
        self.close_connection = True

    def log_message(self, *arguments):
        """Nothing is logged."""


class ScriptedServer(ThreadingHTTPServer):
    """Answers on a free port until it is closed.

    Args:
        script: the fault of a request by its number from 1; None: a right answer.
        answer: the right answer to a body.
        token: that requests of /health must carry.
        terms: that /health names.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script=lambda number: None, answer=right_answer, token=None, terms=("a",)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.answer, self.token, self.terms = script, answer, token, dict.fromkeys(terms, "f")
        self.requests, self.lock, self.over = [], threading.Lock(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def handle_error(self, request, client_address):
        """A client that has gone is no error of the server."""

    def close(self):
        self.over.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
