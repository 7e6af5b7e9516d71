"""The registry of rewards.

Reward: f(response, row, *, options) -> float. It sees the text of the response and the row of the data set, never the
prompt pasted in front. Facts: `reads`, the fields of the row that it needs; `extract`, f(response, options) -> str or
None, the answer that it finds in a response: equal texts for equal answers, for a majority vote.
"""

from rft.registry import Registry

REWARDS = Registry("reward", functions=("extract",), reads=(), extract=None)
