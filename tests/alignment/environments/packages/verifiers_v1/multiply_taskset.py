"""A taskset of verifiers 0.4, with a tool: multiplication. Nothing in it is ours."""

from collections.abc import Iterable

import verifiers.v1 as vf


class MultiplyData(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


class MultiplyTask(vf.Task[MultiplyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return 1.0 if trace.last_reply == self.data.answer else 0.0

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


class MultiplyConfig(vf.TasksetConfig):
    num_rows: int = 4


class MultiplyTaskset(vf.Taskset[MultiplyTask, MultiplyConfig]):
    def load(self) -> Iterable[MultiplyTask]:
        for number in range(self.config.num_rows):
            data = MultiplyData(prompt=f"{number} times 3?", answer=str(3 * number))
            yield MultiplyTask(data, self.config.task)


__all__ = ["MultiplyTaskset"]

if __name__ == "__main__":
    Calculator.run()
