"""The registry of rewards.

Reward: f(response, row, *, options) -> float. It receives the text of the response without the prompt, and the row
of the data set. Facts: `reads`, the fields of the row that it needs; `extract`, f(response, options) -> str or None,
the answer in a response: equal answers have equal texts, for a majority vote; `gold`, f(row, options), which raises a
ValueError if no response can be right: the run calls it for every row before it loads a model.
"""

from rft.registry import Registry

REWARDS = Registry("reward", functions=("extract", "gold"), reads=(), extract=None, gold=None)
