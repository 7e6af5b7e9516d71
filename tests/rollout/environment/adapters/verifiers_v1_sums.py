"""A taskset as users of verifiers 0.4 write it: tasks, a tool and rewards."""

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str = ""


class Doubler(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def double(self, number: int) -> str:
        """Doubles a number."""
        return str(2 * number)


class SumConfig(vf.TaskConfig):
    tools: bool = False


class SumTask(vf.Task[Sum, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Doubler(vf.ToolsetConfig())] if config.tools else []

    @vf.reward
    async def right(self, trace) -> float:
        if trace.last_message.content == "raise":
            raise ZeroDivisionError("by zero")
        return float(trace.last_message.content == self.data.answer)

    @vf.reward(weight=0.25)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    count: int = 6
    asked: bool = True
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(1, self.config.count + 1):
            text = f"{n}+{n}=" if self.config.asked else None
            yield SumTask(Sum(prompt=text, system_prompt="Add.", answer=str(2 * n)), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":  # the server of the tool
    Doubler.run()
