"""Records the operations of a function as a CUDA graph, which starts them all at once."""

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraph:
    """A function of one tensor, recorded on the current device.

    It must compute the same when it is called again, and must not read a number of the device.

    Args:
        function: all other tensors that it reads keep their addresses.
        example: an argument; later ones have its shape.
        name: of the model, for messages.

    Raises:
        ValueError: the function cannot be recorded; names the key and the cure.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor, name: str) -> None:
        self._argument = example.clone()
        self._graph = torch.cuda.CUDAGraph()
        function(self._argument)  # what libraries do at their first call cannot be recorded
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may use the device
                self._result = function(self._argument)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise refusal(f"a step of {name} cannot be recorded ({str(error).splitlines()[0]})") from error

    def replay(self, argument: Tensor) -> Tensor:
        """The result for an argument. It is overwritten by the next call."""
        self._argument.copy_(argument)
        self._graph.replay()
        return self._result


def refusal(reason: str) -> ValueError:
    """The error of a run whose steps cannot be recorded."""
    return ValueError(f"rollout.engine.cuda_graphs=true: {reason}; set rollout.engine.cuda_graphs=false")
