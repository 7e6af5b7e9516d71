"""`mode=chat`: a conversation in the terminal. With data.template=none there are no turns: it completes each line."""

from typing import Any

from rich.console import Console
from rich.text import Text

from rft.modes.model import Answering
from rft.redaction import redact
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.sampler import Sampler
from rft.sanitize import printable

HELP = "/clear forgets the conversation, /system <text> starts one with another system prompt, /quit ends"


def chat(config: dict[str, Any], console: Console) -> float:
    """Answers until /quit or the end of the input. Returns the number of answers.

    Args:
        config: the resolved config as plain containers.
        console: reads lines and prints answers.

    Raises:
        ValueError: lists all mistakes of the config and the checkpoint; or there are several processes.
    """
    job = Answering(config)
    job.world = job.join()
    job.find(job.run.chat.checkpoint, "chat.checkpoint")
    job.check.end()
    if job.world.size > 1:
        raise ValueError("mode=chat runs in one process; start it without torchrun")
    with job.started() as sampler:
        greeting = (
            f"{job.title}. {HELP}" if job.run.data.template != "none" else f"{job.title} completes text. /quit ends"
        )
        console.print(greeting, style="dim", highlight=False, soft_wrap=True)
        return float(talk(job, sampler, console))


def talk(job: Answering, sampler: Sampler, console: Console) -> int:
    """Answers line after line; a line that fails is reported and dropped. Returns the number of answers."""
    run, turns = job.run, job.run.data.template != "none"
    sampling = run.rollout.untruncated(0.0) if run.chat.greedy else run.rollout
    context = job.policy.context
    opening: list[dict[str, str]] = []  # the encoder prepends data.system
    history, answers = list(opening), 0
    while True:
        try:
            line = console.input(Text("> ", style="bold"))
        except (EOFError, KeyboardInterrupt):
            console.print()
            return answers
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            return answers
        if turns and command in ("/clear", "/system"):
            if command == "/system":
                opening = [{"role": "system", "content": rest.strip()}]
            history = list(opening)
            continue
        if not line.strip() or (turns and command.startswith("/")):
            console.print(HELP if turns else "/quit ends", style="dim", highlight=False)
            continue
        turns_so_far = [*history, {"role": "user", "content": line}]
        try:
            prompt = job.policy.encoder.prompt({"prompt": turns_so_far if turns else line})
        except ValueError as error:
            console.print(Text(printable(redact(f"the prompt cannot be encoded: {error}")), style="red"))
            continue
        if len(prompt) + sampling.max_new_tokens > context:
            sizes = f"{len(prompt)} tokens and an answer of rollout.max_new_tokens={sampling.max_new_tokens}"
            console.print(
                Text(f"{sizes} are over the model's context of {context}; /clear, or shorten it", style="red")
            )
            continue
        [[answer]] = sampler.generate([Request(prompt, [row_seed(run.seed, answers, 0)])], sampling)
        answers += 1
        history = [*turns_so_far, {"role": "assistant", "content": answer.text}]
        console.print(Text(printable(answer.text)))
        if answer.finish_reason == "length":
            console.print(f"(cut at rollout.max_new_tokens={sampling.max_new_tokens})", style="dim", highlight=False)
