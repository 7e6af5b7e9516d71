"""A judge behind an address: what it is asked, what becomes of its answers, and of answers that do not come."""

import base64
import io
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rft.errors import FunctionError
from tests.families import picture
from tests.helpers import yaml_options
from tests.reward.models.test_scalar import RESPONSES, ROWS
from tests.reward.reward_of import reward_of

GRADE = {"pattern": r"(?i)verdict: (\w+)", "unparsed": 0.5}
QUESTION = {"text": "{prompt}={response}", "words": ["Yes", "No"]}
SCORES = [1.0, 0.0, 3.0, 0.5]  # 1+1=2, 2=12, 1+2+3+4=10, 9+9=
TEXTS = {"1+1=2": "Sure.\nVerdict: Yes", "2=12": "verdict: no", "1+2+3+4=10": "Verdict: 3", "9+9=": None}


class Scripted(BaseHTTPRequestHandler):
    """Answers as `TEXTS` says, after the faults of the server's script."""

    def do_GET(self):
        self._say(200, {"data": [{"id": "wise"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, question = self.server, body["messages"][-1]["content"]
        with server.lock:
            server.asked[json.dumps(question) if isinstance(question, list) else question] += 1
            fault = server.faults.pop(0) if server.faults else None
        server.last = body, self.headers["Authorization"]
        if fault == "silent":
            server.over.wait(5.0)
        elif fault == "garbage":
            self._say(200, {"choices": []})
        elif fault is not None:
            self._say(fault, {"error": "out of order"})
        else:
            text = "Verdict: yes" if isinstance(question, list) else TEXTS[question]
            self._say(200, {"choices": [{"message": {"content": text}}]})

    def _say(self, status, thing):
        text = json.dumps(thing).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        """Nobody reads it."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """A call is repeated at once; tests/reward/test_call.py measures the pauses."""
    monkeypatch.setattr("rft.reward.call.PAUSES_S", (0.0, 0.0))


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as served:
        served.asked, served.faults, served.lock, served.over = Counter(), [], threading.Lock(), threading.Event()
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.over.set()
        served.shutdown()
        thread.join()


def judge(server, call=None, **changes):
    node = yaml_options("reward/terms/judge_server.yaml")["judge_server"] | {"grade": GRADE, "question": QUESTION}
    node |= {"_target_": "rft.reward.services.judge_server.ServedJudge", "model": "wise"}
    node |= {"addresses": [f"http://127.0.0.1:{server.server_port}/v1/"], "max_new_tokens": 8}
    call = {"concurrency": 3, "deadline_s": 30.0, "tries": 2, "failed": "stop", **(call or {})}
    return reward_of({"judge": node | {"call": call} | changes}, "judge")


def test_every_response_is_asked_about_once(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    reward = judge(server, token="MY_KEY", system="Be just.", body=extra)
    reward.check()
    assert reward.score(RESPONSES, ROWS).total.tolist() == SCORES
    assert server.asked == dict.fromkeys(TEXTS, 1)
    body, key = server.last
    assert body["messages"][0] == {"role": "system", "content": "Be just."} and key == "Bearer secret"
    assert (
        body["model"] == "wise"
        and body["temperature"] == 0
        and body["max_tokens"] == 8
        and body.items() >= extra.items()
    )


def test_what_fails_once_is_asked_again(server):
    server.faults = [500, 429, "garbage", "silent"]
    call = {"deadline_s": 0.5, "concurrency": 4}
    assert judge(server, call).score(RESPONSES, ROWS).total.tolist() == SCORES
    assert sum(server.asked.values()) == 8


def test_a_question_that_a_server_does_not_answer_goes_to_another(server):
    addresses = ["http://127.0.0.1:9/v1", f"http://127.0.0.1:{server.server_port}/v1"]
    reward = judge(server, {"tries": 1}, addresses=addresses)
    reward.check()
    assert reward.score(RESPONSES, ROWS).total.tolist() == SCORES


@pytest.mark.parametrize(
    ("faults", "calls", "reason", "said"),
    [
        ([503, 503], 2, "refused", 'POST /chat/completions: status 503: {"error": "out of order"}'),
        ([400], 1, "refused", "POST /chat/completions: status 400"),
        (["garbage"] * 2, 2, "bad_response", "the answer of /chat/completions cannot be read: IndexError"),
        pytest.param(["silent"] * 2, 2, "deadline", "not done in deadline_s=0.5", marks=pytest.mark.slow),
    ],
)
def test_what_fails_for_good_is_unscored_or_ends_the_run_by_name(server, faults, calls, reason, said):
    server.faults = list(faults)
    call = {"deadline_s": 0.5 if "silent" in faults else 30.0}
    found = judge(server, call | {"failed": "drop_row"}).score(RESPONSES[:1], ROWS[:1])
    assert found.total.isnan().tolist() == [True] and sum(server.asked.values()) == calls
    assert found.unscored == [{"judge": reason}]
    server.faults = list(faults)
    with pytest.raises(FunctionError, match=r"^the reward term 'judge' failed on row 0") as caught:
        judge(server, call).score(RESPONSES[:1], ROWS[:1])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "foolish"}, r"model=foolish: .*http://.* serves wise; name one of these"),
        ({"addresses": ["http://127.0.0.1:9/v1"]}, r"addresses\[0\]=.*: GET /models: .*Connect call failed"),
        ({"addresses": ["127.0.0.1:9"]}, r"addresses\[0\]: 127.0.0.1:9 is not a URL"),
        ({"token": "NO_SUCH_KEY"}, r"token=NO_SUCH_KEY: there is no such environment variable"),
        ({"question": QUESTION | {"text": "{a}{b}"}}, r"question\.text compares {a} and {b}"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, changes, message):
    with pytest.raises(ValueError, match=rf"^reward\.terms\.judge\.{message}"):
        judge(server, **changes).check()


def test_the_media_of_a_row_are_sent_as_parts_of_the_question(server):
    picture(0).save(file := io.BytesIO(), "png")
    content = [{"type": "image", "image": file.getvalue()}, {"type": "text", "text": "how many"}]
    reward = judge(server, system="Be just.")
    assert reward.score(["2"], [{"prompt": [{"role": "user", "content": content}]}]).total.tolist() == [1.0]
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    assert server.last[0]["messages"] == [
        {"role": "system", "content": "Be just."},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "how many=2"}],
        },
    ]
