"""`mode=chat`: a conversation at the terminal. With data.template=none there are no turns: each line is completed."""

from typing import Any

from rich.console import Console
from rich.text import Text

from rft.modes.model import Answering
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.sampler import Sampler

HELP = "/clear forgets the conversation, /system <text> does so under another system prompt, /quit ends"


def chat(config: dict[str, Any], console: Console) -> float:
    """Talks until /quit or the end of the input. Returns the number of answers.

    Args:
        config: the resolved config as plain containers.
        console: where to talk.

    Raises:
        ValueError: what is wrong with the config or the checkpoint, or there are several processes.
    """
    job = Answering(config)
    job.find(job.run.chat.checkpoint, "chat.checkpoint")
    job.check.end()
    if job.world.size > 1:
        raise ValueError("mode=chat talks in one process; start it without torchrun")
    with job.started() as sampler:
        said = f"{job.title}. {HELP}" if job.run.data.template != "none" else f"{job.title} completes text. /quit ends"
        console.print(said, style="dim", highlight=False, soft_wrap=True)
        return float(talk(job, sampler, console))


def talk(job: Answering, sampler: Sampler, console: Console) -> int:
    """Answers line after line; what cannot be answered is said and forgotten. Returns the number of answers."""
    run, turns = job.run, job.run.data.template != "none"
    sampling = run.rollout.untruncated(0.0) if run.chat.greedy else run.rollout
    context = job.shape.get_text_config().max_position_embeddings
    opening: list[dict[str, str]] = []  # data.system is put in front by the encoder
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
        asked = [*history, {"role": "user", "content": line}]
        try:
            prompt = job.encoder.prompt({"prompt": asked if turns else line})
        except ValueError as error:
            console.print(Text(f"this cannot be asked: {error}", style="red"))
            continue
        if len(prompt) + sampling.max_new_tokens > context:
            said = f"{len(prompt)} tokens and an answer of rollout.max_new_tokens={sampling.max_new_tokens} are over "
            console.print(Text(f"{said}the model's context of {context}; /clear, or say it shorter", style="red"))
            continue
        [[answer]] = sampler.generate([Request(prompt, [row_seed(run.seed, answers, 0)])], sampling)
        answers += 1
        history = [*asked, {"role": "assistant", "content": answer.text}]
        console.print(Text(answer.text))
        if answer.finish_reason == "length":
            console.print(f"(cut at rollout.max_new_tokens={sampling.max_new_tokens})", style="dim", highlight=False)
