"""Environments as users of verifiers write them: `load_environment`, with a data set, tools and rubrics."""

import verifiers as vf
from datasets import Dataset

SUMS = Dataset.from_list(
    [{"question": f"{n}+{n}=", "answer": str(2 * n), "info": {"kind": "odd" if n % 2 else "even"}} for n in range(1, 7)]
)


def right(completion, answer, info) -> float:
    return float(completion[-1]["content"] == answer and info["kind"] in ("odd", "even"))


def reward(completion, **kwargs) -> float:
    """A name that verifiers reports beside the reward."""
    return float(len(completion))


def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: what is doubled.
    """
    if number < 0:
        raise ValueError("negative")
    return str(2 * number)


class Twice(vf.MultiTurnEnv):
    """Asks again, until the policy writes "end"."""

    async def env_response(self, messages, state, **kwargs):
        if state["prompt"][-1]["content"] == "2+2=":
            raise vf.InfraError("the sandbox is gone")
        if messages[-1]["content"] == "end":
            state["final_env_response"] = [{"role": "user", "content": "Bye."}]
        return [{"role": "user", "content": "Sure?"}]


def compared(completions) -> list[float]:
    return [float(len(one)) for one in completions]


def load_environment(kind="single", held_out=True):
    options = {"dataset": SUMS.select(range(4)), "system_prompt": "Add."}
    if held_out:
        options["eval_dataset"] = SUMS.select(range(4, 6))
    rubric = vf.Rubric(funcs=[right, reward], weights=[1.0, 0.25])
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **options)
    if kind == "twice":
        return Twice(rubric=rubric, **options)
    if kind == "tools":
        return vf.ToolEnv(tools=[double], rubric=rubric, **options)
    if kind == "compared":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[compared]), **options)
    raise KeyError(kind)
