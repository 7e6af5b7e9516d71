"""The registry of rewards.

Reward: f(response, row, *, options) -> float. It sees the text of the response and the row of the data set, never the
prompt pasted in front. Facts: `reads`, the fields of the row that it needs.
"""

from rft.registry import Registry

REWARDS = Registry("reward", reads=())
