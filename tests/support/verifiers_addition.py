"""A taskset of `verifiers` as its documentation writes them. Imported only by tests that have the package."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["AdditionTaskset"]


class AdditionData(vf.TaskData):
    answer: int


class AdditionTaskConfig(vf.TaskConfig):
    tolerance: int = 0


class AdditionTask(vf.Task[AdditionData, vf.State, AdditionTaskConfig]):
    @vf.reward(weight=2.0)
    async def exact_match(self, trace: vf.Trace) -> float:
        error = abs(int(trace.last_reply) - self.data.answer)
        return float(error <= self.config.tolerance)

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4 and trace.num_turns == 1)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.messages))


class AdditionConfig(vf.TasksetConfig):
    num_tasks: int = 40
    task: AdditionTaskConfig = AdditionTaskConfig()


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            data = AdditionData(
                prompt=f"What is {number} + {number}?", system_prompt="Answer with a number.", answer=2 * number
            )
            yield AdditionTask(data, self.config.task)
