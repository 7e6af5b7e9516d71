"""Records the operations of a function as a CUDA graph, which starts them all at once."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class CudaGraph(Generic[Result]):
    """A function without arguments, recorded on the current device. It is not computed until the first replay.

    Args:
        function: reads no number of the device, and the tensors that it reads and changes keep their addresses. It was
            called before, since what libraries do at their first call cannot be recorded.
        name: of the model, for messages.

    Raises:
        ValueError: the function cannot be recorded; names the key and the cure.
    """

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may use the device
                self._result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise refusal(f"a step of {name} cannot be recorded ({str(error).splitlines()[0]})") from error

    def replay(self) -> Result:
        """Computes the function. The next call overwrites the tensors of the result."""
        self._graph.replay()
        return self._result


def refusal(reason: str) -> ValueError:
    """The error of a run whose steps cannot be recorded."""
    return ValueError(f"rollout.engine.cuda_graphs=true: {reason}; set rollout.engine.cuda_graphs=false")
