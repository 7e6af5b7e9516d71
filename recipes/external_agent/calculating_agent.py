"""An agent around the client of OpenAI: it computes the products that the model asks for. It imports nothing of `rft`.

`openai` is imported once, by the process that forks a process for every episode.
"""

import re
from typing import Any

from openai import AsyncOpenAI

PRODUCT = re.compile(r"\?(\d{1,9})\*(\d{1,9})")  # the model asks: ?37*48


async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Plays an episode; returns 1 if the last answer is right, otherwise 0.

    Args:
        data: the row, with `prompt` ("37*48=") and `answer` ("1776").
        base_url, api_key: of the policy.
    """
    messages = [{"role": "user", "content": data["prompt"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await ask(client, messages)
        if found := PRODUCT.fullmatch(answer):
            messages.append({"role": "user", "content": f"{int(found[1]) * int(found[2])}="})
            answer = await ask(client, messages)
    return float(answer == data["answer"])


async def ask(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> str:
    """The answer of the policy, which is added to the messages."""
    response = await client.chat.completions.create(model="policy", messages=messages)
    message = response.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.content or ""
