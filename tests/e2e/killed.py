"""vLLM servers of a run, one of which is killed while it samples; what has become of it is written to a file."""

import asyncio
import json
import os
import signal
from pathlib import Path

from rft.rollout.server.vllm import VLLMServers
from tests.rollout.server.real_servers import counted, processes_of, shared_memory, until

NOTE = "killed.json"
ANSWERED = "vllm:request_success_total"  # counts the samples that a server has given


class KilledServers(VLLMServers):
    """In the second round of training the busier server is killed; the round ends once it is back.

    The note, in the working folder, tells of the one that was killed: how many samples there were by then, whether it
    gives one of them again once it is back, how many it gave in the last round, and what is left of its shared memory.
    """

    round = 0

    def generate(self, requests, sampling, on_completion=None):
        if len(requests[0].seeds) == 1:  # an evaluation
            return super().generate(requests, sampling, on_completion)
        self.round += 1
        if self.round == 2:
            return self.lose(requests, sampling)
        found = super().generate(requests, sampling, on_completion)
        if self.round > 2:
            self.note["answered"] = counted(self.victim, ANSWERED)
            Path(NOTE).write_text(json.dumps(self.note))
        return found

    def lose(self, requests, sampling):
        """A round in which the busier server is killed."""
        self.victim, self.note = None, {}
        own = {server.client: processes_of(server.client.port) for server in self._servers}
        shares = {client: shared_memory(processes) for client, processes in own.items()}
        done = 0

        def kill(request, sample, completion):
            nonlocal done
            done += 1
            busiest = max(self._servers, key=lambda server: server.running)
            if self.victim is None and done >= 8 and busiest.running >= 4:
                self.victim, self.note["done"] = busiest.client, done
                signal_all(own[busiest.client], signal.SIGSTOP)  # so that it owes samples, however fast it is
                asyncio.get_running_loop().call_later(0.3, signal_all, own[busiest.client], signal.SIGKILL)

        found = super().generate(requests, sampling, kill)
        until(self.back, 300)
        call, old = self._sample_requests(requests[0], sampling)[0].call(self.victim), found[0][0]
        new = self._server_api.parse(asyncio.run(self.victim.post(call.path, call.body)))
        apart = [abs(one - other) for one, other in zip(old.logprobs, new.logprobs, strict=False)]
        self.note |= {"same": old.tokens == new.tokens and max(apart) < 1e-4, "before": counted(self.victim, ANSWERED)}
        held = shares[self.victim]
        self.note |= {"held": len(held), "left": [str(file) for file in held if file.exists()]}
        self.note |= {"number": int(self.victim.name.split()[1])}
        return found

    def back(self):
        """True where the server that was killed serves the current version again."""
        try:
            return asyncio.run(self._server_api.version(self.victim)) == self.version
        except OSError:
            return False


def signal_all(processes, number):
    """Sends a signal to each of some processes."""
    for process in processes:
        os.kill(process, number)
