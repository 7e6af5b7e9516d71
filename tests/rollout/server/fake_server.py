"""A small server for scripted faults that speaks the messages of vLLM's and of SGLang's. Its "model" is a checksum of
the weights that it was given, so what it says of a sample shows which weights it has.

Run as `python fake_server.py --port 8001` it is a process that can be killed; `FakeServer` is one in this process.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import threading
import zlib
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

END = 2
SERVER_INFO = {
    "vllm_config": {
        "model_config": {
            "logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "enable_sleep_mode": False,
        },
        "parallel_config": {
            "worker_extension_cls": "rft_receiver.Receiver", "world_size": 1, "data_parallel_size": 1,
        },
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
        "lora_config": None,
        "speculative_config": None,
    },
    "device": "cpu", "dtype": "float32", "tp_size": 1, "dp_size": 1, "pp_size": 1, "enable_memory_saver": False,
}  # fmt: skip

TRANSFER = [  # the messages of vLLM's own weight transfer
    "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update",
]  # fmt: skip
PARTS = frozenset(("weights", "kv_cache"))


def answer_of(prompt, seed, limit, weights):
    """What a server with these weights (a checksum) samples: tokens, log-probabilities, finish reason."""
    rng = random.Random(repr((prompt, seed)))
    tokens = [rng.randrange(3, 40) for _ in range(rng.randrange(1, 2 * limit))][:limit]
    if len(tokens) < limit:
        tokens[-1] = END
    logprobs = [logprob_of(prompt + tokens[: place + 1], weights) for place in range(len(tokens))]
    return tokens, logprobs, "stop" if tokens[-1] == END else "length"


def logprob_of(ids, weights):
    """The log-probability of the last of these ids."""
    return -(zlib.crc32(repr((ids, weights)).encode()) % 5000) / 1000


def checksum(tensors):
    """Of the bytes of tensors by their names."""
    return zlib.crc32(b"".join(name.encode() + zlib.crc32(tensors[name]).to_bytes(4) for name in sorted(tensors)))


def read_weights(folder):
    """The checksum of all safetensors files of a folder, read as the format says."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = data[8 + size + start : 8 + size + end]
    return checksum(tensors)


class FakeServer:
    """One server in threads of this process.

    Attributes:
        faults: by path, what happens to the next calls: a name, a status, seconds of delay or a function that is called
            before the answer each, or None.
        always: by path, what happens to all calls without a fault of their own.
        seconds: that a sample takes.
        token_s: that a token of vLLM's messages takes; where it is above 0, weights may change within a sample.
        aborts: how often running samples were aborted.
        hold_at: where `token_s` is above 0, tokens after which a sample waits for its abort; None: it does not wait.
        held: a sample waits so.
        capacity: samples at once; more are refused with 503.
        calls: how often each path was called; `samples` how often each (prompt, seed) was answered.
        running, most: samples at work now, and at most so far.
        memory: what it has memory for; `loaded`: what it had it for at the last load.
        missing: parameters that no load brings.
        key: that requests must carry; None: none.
        workers, wait_s: see fake_workers.py; how long they wait, where no message says it.
    """

    def __init__(self, port=0, version=None, weights=0):
        self.version, self.weights = version, weights
        self.faults, self.always = defaultdict(list), {}
        self.seconds, self.token_s, self.capacity = 0.0, 0.0, 10**6
        self.aborts, self.hold_at, self.held = 0, None, False
        self.calls, self.samples = Counter(), Counter()
        self.running = self.most = 0
        self.paused, self.dummy = False, True
        self.missing = []
        self.key = None
        self.memory = self.loaded = PARTS
        self.workers, self.wait_s = None, 10.0
        self.gone = threading.Event()
        self.lock = threading.Lock()
        self.sockets = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def handle(self):
                fake.sockets.add(self.connection)
                with contextlib.suppress(OSError):  # of a client that went away
                    super().handle()
                fake.sockets.discard(self.connection)

            def do_GET(self):
                if self.path == "/inference/v1/generate":
                    return self.send_error(405)
                fake.serve(self, b"{}")

            def do_POST(self):
                fake.serve(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256
            block_on_close = False

            def handle_error(self, request, client_address):
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self):
        """Nobody listens any more, and every connection breaks."""
        self.gone.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, handler, body):
        path = handler.path
        whole = f"{path} {json.loads(body)['method']}" if path == "/collective_rpc" else path
        with self.lock:
            self.calls.update({path, whole})
            key = whole if self.faults[whole] or whole in self.always else path
            fault = self.faults[key].pop(0) if self.faults[key] else self.always.get(key)
        if fault == "drop":
            return
        if fault == "never":
            self.gone.wait()
            return
        if fault == "late" or isinstance(fault, float):
            self.gone.wait(0.1 if fault == "late" else fault)
        if callable(fault):
            fault()
        if fault == "corrupt":
            body = body[: len(body) // 2] + b"\x00"
        try:
            status, answer = self.perform(path, json.loads(body), fault)
            if fault == "twice":
                status, answer = self.perform(path, json.loads(body), fault)
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            status, answer = 400, {"error": {"message": repr(error)}}
        if isinstance(fault, int):
            status, answer = fault, {"error": {"message": "as scripted"}}
        if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
            status, answer = 401, {"error": "Unauthorized"}
        data = json.dumps(answer).encode()
        if fault == "lose":
            return
        if fault == "garbage":
            data = b"<html>\xff</html>"
        if fault == "twice":
            data += data
        if fault == "cut":
            data = data[: len(data) // 2]
        if fault == "no http":
            handler.wfile.write(b"\x00\x01 nonsense\r\n\r\n")
            return
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) // 2 if fault == "twice" else len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def perform(self, path, body, fault):
        """Status and answer of a call."""
        known = "default" if self.version is None else self.version
        if path == "/health":
            return 200, None
        if path in ("/model_info", "/weight_info"):
            return 200, {"weight_version": known}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path.startswith("/server_info"):
            return 200, SERVER_INFO
        if path in ("/generate", "/inference/v1/generate"):
            return self.generate(path, body, fault)
        if fault == "ignore":
            return 200, {"success": True, "message": "as scripted"}
        if path.startswith("/pause"):
            self.paused = True
            self.aborts += path == "/pause?mode=abort"
        elif path in ("/resume", "/continue_generation"):
            self.paused = False
        elif path == "/sleep?level=2":
            self.paused, self.memory = True, frozenset()
            self.forget()
        elif path.startswith("/wake_up?tags="):
            self.memory |= {path.rpartition("=")[2]}
            self.paused = self.paused and self.memory != PARTS
        elif path.startswith("/flush_cache?timeout="):
            self.dummy = True
        elif path.endswith("_memory_occupation"):
            self.occupy(path.startswith("/resume"), frozenset(body["tags"]))
        elif path == "/update_weights_from_disk":
            self.load(body["model_path"])
            self.version = body.get("weight_version") or self.version
        elif path == "/collective_rpc":
            result = None
            if body["method"] in ("reload_weights", "rft_load"):
                self.load(body["kwargs"]["weights_path"])
                result = self.missing
            elif body["method"] in ("rft_join", "rft_map", "rft_receive"):
                getattr(self.workers, body["method"])(**body["kwargs"])
                self.take(checksum(self.workers.held))
                result = self.missing
            return 200, {"results": [result]}
        elif path.endswith(("_weights_update_group", "_weights_from_distributed")):
            if not self.workers.message(path, body, self.wait_s):
                return 400, {"success": False, "message": "as its workers say"}
            self.take(checksum(self.workers.held))
        elif path in TRANSFER:
            self.workers.transfer(path, body, self.wait_s)
            if "engine" not in path:
                self.take(checksum(self.workers.held))
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif not path.startswith("/reset_prefix_cache"):
            return 404, {"error": {"message": f"no {path}"}}
        return 200, {"success": True, "message": ""}

    def load(self, folder):
        if not list(Path(folder).glob("*.safetensors")):
            raise ValueError(f"no weights in {folder}")
        self.take(read_weights(folder))

    def take(self, weights):
        self.end_unless("weights" in self.memory)
        self.loaded, self.weights = self.memory, weights

    def occupy(self, more, parts):
        """What SGLang does; told what does not fit it ends."""
        self.end_unless(self.dummy and bool(parts) and (not parts & self.memory if more else parts <= self.memory))
        self.memory = self.memory | parts if more else self.memory - parts
        if "weights" not in self.memory:
            self.forget()

    def forget(self):
        self.weights = 0
        if self.workers is not None:
            self.workers.held.clear()

    def end_unless(self, well):
        if not well:
            self.kill()
            raise RuntimeError("it has ended")

    def generate(self, path, body, fault):
        with self.lock:
            if self.running >= self.capacity:
                return 503, {"error": {"message": "busy"}}
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self.gone.wait(self.seconds)
            while self.paused and not self.gone.wait(0.01):
                pass
            self.end_unless(self.memory == PARTS)
            self.dummy = False
            how = body["sampling_params"]
            if path == "/generate":
                prompt, seed, limit = body["input_ids"], how["sampling_seed"], how["max_new_tokens"]
            else:
                prompt, seed, limit = body["token_ids"], how["seed"], how["max_tokens"]
            tokens, logprobs, reason = answer_of(prompt, seed, limit, self.weights)
            if self.token_s and path != "/generate":
                return 200, {"choices": [self.token_by_token(prompt, tokens, reason)]}
            with self.lock:
                self.samples[tuple(prompt), seed] += 1
            version = "default" if self.version is None else self.version
            if fault == "old":
                version = str(int(version) - 1)
            if fault == "nan":
                logprobs[0] = float("nan")
            if fault == "long":
                tokens, logprobs = tokens + [3] * limit, logprobs + [-1.0] * limit
            if fault == "abort":
                reason = "abort"
            pairs = list(zip(logprobs, tokens, strict=True))
            if path == "/generate":
                meta = {
                    "finish_reason": {"type": reason, "message": "as scripted"},
                    "weight_version": version,
                    "completion_tokens": len(tokens),
                    "output_token_logprobs": [[number, token, None] for number, token in pairs],
                }
                return 200, {"text": "", "output_ids": tokens, "meta_info": meta}
            choice = {
                "finish_reason": reason,
                "token_ids": tokens,
                "logprobs": {"content": [{"token_id": token, "logprob": number} for number, token in pairs]},
                "weight_versions": [{"start": 0, "end": len(tokens), "version": version}],
            }
            return 200, {"choices": [choice]}
        finally:
            with self.lock:
                self.running -= 1

    def token_by_token(self, prompt, tokens, reason):
        """The choice of a sample whose tokens have the weights of their time; those behind an abort are left out."""
        aborts, logprobs, spans = self.aborts, [], []
        for place in range(len(tokens)):
            self.gone.wait(self.token_s)
            while (self.paused or place == self.hold_at) and self.aborts == aborts and not self.gone.wait(0.005):
                self.held = place == self.hold_at
            if self.aborts != aborts:
                reason, tokens = "abort", tokens[:place]
                break
            logprobs.append(logprob_of(prompt + tokens[: place + 1], self.weights))
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"start": place, "version": self.version})
            spans[-1]["end"] = place + 1
        content = [{"token_id": token, "logprob": number} for number, token in zip(logprobs, tokens, strict=True)]
        return {
            "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    options = parser.parse_args()
    if options.fail:
        sys.exit(options.fail)
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    server = FakeServer(options.port)
    server.seconds, server.key = options.seconds, os.environ.get("RFT_SERVER_KEY")
    threading.Event().wait()


if __name__ == "__main__":
    main()
