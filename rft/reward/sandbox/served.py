"""Tests programs on a server with SandboxFusion's protocol (github.com/bytedance/SandboxFusion)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.ranges import PositiveInt, Seconds
from rft.remote.http_client import RequestFailed, ServerClient, bearer, key_named
from rft.remote.retry import Backoff
from rft.reward.sandbox.cases import Script
from rft.reward.sandbox.code import ProgramOptions, ProgramTests
from rft.reward.sandbox.programs import Outcome
from rft.reward.term import Unscored

PAUSES_S = (0.5, 60.0)  # the shortest and the longest pause between two calls


@dataclass(frozen=True)
class ServedCodeOptions(ProgramOptions):
    """The options of `ServedCodeTests`.

    Attributes:
        address: of the server: http://host:8080.
        token: the name of the environment variable that holds the server's bearer token, or null where it needs none.
        seconds: of one run of a program, in the server.
        memory_mib: of one run of a program.
        concurrency: programs at the same time, of each process of the run.
        deadline_s: seconds that one request may take.
        tries: requests for one run of a program.
    """

    address: str
    token: str | None
    seconds: Seconds
    memory_mib: PositiveInt
    concurrency: PositiveInt
    deadline_s: Seconds
    tries: PositiveInt


class ServedCodeTests(ProgramTests):
    """Tests programs by POST /run_code. What is expected stays in this process, as with `CodeTests`.

    A failure of the server is repeated, and then leaves the response without a score.

    Args:
        key: supplied; the term's place in the yaml.
        options: as in `ProgramTests`.

    Raises:
        ValueError: the address is malformed; names the key.
    """

    Options = ServedCodeOptions
    options: ServedCodeOptions

    def __init__(self, key: str, options: ServedCodeOptions) -> None:
        super().__init__(options)
        address, seconds, deadline_s = options.address, options.seconds, options.deadline_s
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{key}.address={address}: write it as http://host:8080")
        if deadline_s <= seconds:
            raise ValueError(f"{key}.deadline_s={deadline_s:g}: it must be longer than {key}.seconds={seconds:g}")
        self.threads = options.concurrency
        self._key = key
        self._address = address.removesuffix("/").removesuffix("/run_code")
        self._limits = {"run_timeout": seconds, "compile_timeout": seconds, "memory_limit_MB": options.memory_mib}

    def check(self) -> None:
        """Checks that the server runs a program. Raises a ValueError that names the key and the cure."""
        key_named(self.options.token, self._key)
        outcome = self.run("print(sum(map(int, input().split())))", "1 2")
        if (outcome.status, outcome.stdout) != ("ok", "3\n"):
            said = f"{outcome.status} {outcome.reason} {outcome.stderr}".strip()
            raise ValueError(
                f"{self._key}.address={self._address}: a program that adds two numbers fails there ({said}); check the "
                "server"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuses tests that need a process apart from the program, too."""
        super().check_row(row)
        if self._tests(row).script is not None:
            raise ValueError(
                f"the field {self.options.field!r} has tests that must run apart from the program, which a server "
                "cannot do; use reward/terms=[code], or write each as `assert f(...) == literal`"
            )

    def run(self, program: str, stdin: str) -> Outcome:
        try:
            program.encode(), stdin.encode()
        except UnicodeEncodeError as error:
            return Outcome("error", "", str(error), 0.0, "no Python source is written in such characters")
        try:
            return asyncio.run(self._run(program, stdin))
        except RequestFailed as error:
            return Outcome("refused", "", "", 0.0, str(error))

    def count_passed(self, program: str, script: Script) -> int | Unscored:
        """None is counted: `check_row` has refused such rows."""
        return Unscored("no sandbox: a server cannot run tests apart from the program")

    async def _run(self, program: str, stdin: str) -> Outcome:
        """Raises a RequestFailed if the last request fails, or one that a repetition does not cure."""
        body = {"code": program, "language": "python", "stdin": stdin, **self._limits}
        pauses, tries = Backoff(*PAUSES_S), self.options.tries
        for attempt in range(1, tries + 1):
            try:
                return await self._post(body)
            except RequestFailed as error:
                if attempt == tries or not error.transient:
                    raise RequestFailed(f"{error} (call {attempt} of {tries})") from error
            await asyncio.sleep(pauses.next())
        raise AssertionError("there is at least one try")

    async def _post(self, body: Mapping[str, Any]) -> Outcome:
        client = self._client()
        try:
            async with asyncio.timeout(self.options.deadline_s):
                answer = await client.post("/run_code", body)
        except TimeoutError as error:
            raise RequestFailed(f"{client.name}: waits for a program, {self.options.deadline_s:g} s") from error
        with client.parse("the answer of /run_code"):
            return outcome_of(answer)

    def _client(self) -> ServerClient:
        headers = bearer(key_named(self.options.token, self._key))
        return ServerClient(f"{self._key}.address={self._address}", self._address, headers, use_proxies=True)


def outcome_of(answer: Mapping[str, Any]) -> Outcome:
    """How a program ended, from an answer of /run_code.

    Raises:
        KeyError, TypeError, ValueError: the server could not run the program, or its answer is malformed.
    """
    if answer["status"] not in ("Success", "Failed"):
        raise ValueError(f"{answer['status']} {answer.get('message')}")
    run = answer["run_result"]
    result: Mapping[str, Any] = answer["compile_result"] if run is None else run
    if result["status"] == "TimeLimitExceeded":
        return _outcome("timeout", result, "")
    if result["status"] != "Finished" or type(code := result["return_code"]) is not int:
        raise ValueError(f"{result['status']} {result.get('stderr')}")
    if (code == 0 and run is not None) != (answer["status"] == "Success"):
        raise ValueError(f"the status is {answer['status']} and the exit status {code}")
    if code < 0:
        return _outcome("killed", result, f"signal {-code}")
    return _outcome("ok", result, "") if code == 0 else _outcome("error", result, f"exit status {code}")


def _outcome(status: Any, result: Mapping[str, Any], reason: str) -> Outcome:
    stdout, stderr = (result.get(name) or "" for name in ("stdout", "stderr"))
    if not isinstance(stdout, str) or not isinstance(stderr, str):
        raise ValueError("stdout and stderr are no texts")
    return Outcome(status, stdout, stderr, float(result.get("execution_time") or 0.0), reason)
