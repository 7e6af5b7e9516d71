"""The registry of rewards.

Reward: f(response, row, *, options) -> float. It receives the text of the response without the prompt, and the row
of the data set. Facts: `reads`, the fields of the row that it needs; `extract`, f(response, options) -> str or None,
the answer in a response: equal answers have equal texts, for a majority vote; `gold`, f(row, options), which raises a
ValueError if no response can be right: the run calls it for every row before it loads a model; `writes`,
f(row, options) -> list of texts, right responses in several writings; `others`, the score of such a response on a row
with another answer, see `Term`. mode=verify checks the last two. `thoughts` and `opening` say which part of a response
with thoughts the function gets, see `Term`. `tool_calls` is the format of the tool calls that it reads, see `Term`.
"""

from rft.registry import Registry

REWARDS = Registry(
    "reward",
    functions=("extract", "gold", "writes"),
    reads=(),
    extract=None,
    gold=None,
    writes=None,
    others="zero",
    thoughts="keep",
    opening=None,
    tool_calls=None,
)
