"""Reward terms that are functions of the user's own, which nothing registers.

A function is `path/to/file.py:name` or `package.module:name`. Its signature says which library
it was written for:

- verl: f(data_source, solution_str, ground_truth, extra_info), and with an `s` at each name, on lists
- TRL: f(prompts, completions, **columns), on lists
- OpenRLHF: f(queries, prompts, labels), on lists
- this project: f(response, row)

Each may be `async def`. Options of the term are keyword arguments of the function.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rft.batch.row_fields import OWN, PROMPT_OPENS
from rft.errors import did_you_mean, naming
from rft.imports import import_named
from rft.reward.route import SOURCE
from rft.reward.term import RowTerm, Term, Unscored, is_tensor

Rows = Sequence[Mapping[str, Any]]
ROW_NAMES = ("response", "row")
SIGNATURES = (
    "f(response, row), f(data_source, solution_str, ground_truth, extra_info) of verl, "
    "f(prompts, completions, **columns) of TRL, f(queries, prompts, labels) of OpenRLHF"
)


def ground_truth(row: Mapping[str, Any]) -> Any:
    """verl's `ground_truth` of a row: that of its field `reward_model`, or else its `answer`.

    Raises:
        ValueError: the row has neither.
    """
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    if "answer" not in row:
        raise ValueError("the row has neither a field 'reward_model' with a 'ground_truth' nor a field 'answer'")
    return row["answer"]


def label(row: Mapping[str, Any]) -> Any:
    """OpenRLHF's `label` of a row: the field of this name, or else its `answer`; None without either."""
    return row.get("label", row.get("answer"))


def prompt_text(row: Mapping[str, Any]) -> str:
    """The prompt as one text: the contents of the messages of a chat are joined by line breaks."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)


def _verl(responses: Sequence[str], rows: Rows) -> dict[str, Any]:
    return {
        "data_sources": [row.get(SOURCE) for row in rows],
        "solution_strs": list(responses),
        "ground_truths": [ground_truth(row) for row in rows],
        "extra_infos": [row.get("extra_info") for row in rows],
    }


def _trl(responses: Sequence[str], rows: Rows) -> dict[str, Any]:
    chats = [isinstance(row["prompt"], list) for row in rows]
    answers = [
        [{"role": "assistant", "content": response}] if chat else response
        for response, chat in zip(responses, chats, strict=True)
    ]
    first = [name for name in rows[0] if name != "prompt" and not name.startswith(OWN)] if rows else []
    common = [name for name in first if all(name in row for row in rows)]
    columns = {name: [row[name] for row in rows] for name in common}
    opened = [row.get(PROMPT_OPENS) for row in rows]
    return {**columns, "prompts": [row["prompt"] for row in rows], "completions": answers, PROMPT_OPENS: opened}


def _openrlhf(responses: Sequence[str], rows: Rows) -> dict[str, Any]:
    prompts = [prompt_text(row) for row in rows]
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return {"queries": queries, "prompts": prompts, "labels": [label(row) for row in rows]}


@dataclass(frozen=True)
class Signature:
    """What a library passes to a reward function on lists.

    Attributes:
        mark: the parameter by which the signature is recognised.
        names: the parameters that have a value.
        columns: every other parameter without a default is a field of the row.
        arguments: from N responses and their rows to the values of the parameters.
    """

    mark: str
    names: tuple[str, ...]
    columns: bool
    arguments: Callable[[Sequence[str], Rows], dict[str, Any]]


VERL = Signature("solution_strs", ("data_sources", "solution_strs", "ground_truths", "extra_infos"), False, _verl)
LISTS = (
    VERL,
    Signature("completions", ("prompts", "completions", PROMPT_OPENS), True, _trl),
    Signature("queries", ("queries", "prompts", "labels"), False, _openrlhf),
)
TRL_ONLY = ("completion_ids", "trainer_state", "log_extra", "log_metric")  # parameters that get no value here
VERL_ROW = {name: f"{name}s" for name in ("data_source", "solution_str", "ground_truth", "extra_info")}


class UserFunction:
    """A function and the keyword arguments that it takes.

    Args:
        path: see the module.
        options: keyword arguments of every call.
        key: of the term, for messages.

    Raises:
        ValueError: the function cannot be loaded, or an option is none of its parameters; names the key.
    """

    def __init__(self, path: Any, options: dict[str, Any], key: str) -> None:
        self.key = key
        self.call = load_function(path, f"{key}.function")
        self.awaits = inspect.iscoroutinefunction(self.call)
        self._options = options
        self.parameters = inspect.signature(self.call).parameters
        kinds = {parameter.kind for parameter in self.parameters.values()}
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        for name in options:
            if name not in self.parameters and not self._takes_all:
                known = did_you_mean(name, self.parameters)
                raise ValueError(f"{key}.{name}: {path} has no such parameter{known}; remove it")

    def missing(self, names: Sequence[str]) -> list[str]:
        """Parameters that need a value and are neither among these names nor options."""
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [
            name
            for name, parameter in self.parameters.items()
            if name not in (*names, *self._options)
            and parameter.default is parameter.empty
            and parameter.kind not in variable
        ]

    def check(self, names: Sequence[str]) -> None:
        """Refuses a function with parameters that get no value, and options in the place of one of these names."""
        if missing := self.missing(names):
            raise ValueError(
                f"{self.key}.function: the parameter {missing[0]!r} gets no value; add `{missing[0]}: <value>` to "
                f"{self.key}, or write one of {SIGNATURES}"
            )
        if doubled := [name for name in self._options if name in names]:
            raise ValueError(f"{self.key}.{doubled[0]}: the run passes this parameter itself; remove it")

    def __call__(self, *data: Any, **supplied: Any) -> Any:
        """Calls the function with those keyword arguments that it takes; the result of `async def` is an awaitable."""
        taken = {name: value for name, value in supplied.items() if self._takes_all or name in self.parameters}
        arguments = {**taken, **self._options}
        if self.awaits:
            return self._awaited(*data, **arguments)
        with naming(f"the reward function of {self.key}", self.call):
            return self.call(*data, **arguments)

    async def _awaited(self, *data: Any, **arguments: Any) -> Any:
        with naming(f"the reward function of {self.key}", self.call):
            return await self.call(*data, **arguments)


class RowFunction(RowTerm):
    """A function of one response: f(response, row), or verl's.

    Attributes:
        needs_truth: every row needs a ground truth.

    Args:
        function: with its options.
        verl: it has the parameters of verl.
    """

    def __init__(self, function: UserFunction, verl: bool) -> None:
        self.awaits = function.awaits
        self.needs_truth = verl
        self._function = function
        function.check(tuple(VERL_ROW) if verl else ROW_NAMES)

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self.needs_truth:
            ground_truth(row)

    def value(self, response: str, row: Mapping[str, Any]) -> Any:
        if not self.needs_truth:
            return self._function(response, row)
        arguments = _verl([response], [row])
        return self._function(**{name: arguments[several][0] for name, several in VERL_ROW.items()})


class BatchFunction(Term):
    """A function on lists.

    Attributes:
        needs_truth: every row needs a ground truth.

    Args:
        function: with its options.
        signature: of the library for which it was written.
    """

    in_workers: ClassVar[bool] = True

    def __init__(self, function: UserFunction, signature: Signature) -> None:
        self.awaits = function.awaits
        self.needs_truth = signature is VERL
        self._function = function
        self._signature = signature
        columns = function.missing(signature.names) if signature.columns else []
        if unknown := [name for name in columns if name in TRL_ONLY]:
            raise ValueError(
                f"{function.key}.function: this version passes no {unknown[0]!r}; give the parameter a default"
            )
        function.check((*signature.names, *columns))
        self.reads = ("prompt", *columns)

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self.needs_truth:
            ground_truth(row)

    def values(self, responses: Sequence[str], rows: Rows) -> Any:
        returned = self._function(**self._signature.arguments(responses, rows))
        return _spread_awaited(returned) if self.awaits else spread(returned)


async def _spread_awaited(found: Awaitable[Any]) -> Sequence[Any]:
    return spread(await found)


def spread(found: Any) -> Sequence[Any]:
    """The values of a function on lists, one for each response.

    Args:
        found: a list, with None for an unscored response; a tensor (N,) or (N, 1); or OpenRLHF's mapping with the
            tensor `rewards` and, under `extra_logs`, further numbers of each response.
    """
    if isinstance(found, Mapping) and "rewards" in found:
        extra = {name: spread(values) for name, values in found.get("extra_logs", {}).items()}
        return [
            {**{name: values[number] for name, values in extra.items()}, "score": value}
            for number, value in enumerate(spread(found["rewards"]))
        ]
    if is_tensor(found):
        return list(found.detach().cpu().flatten().tolist())
    return [Unscored("none") if value is None else value for value in found]


def function_term(node: Mapping[str, Any], key: str) -> RowFunction | BatchFunction:
    """The term of a node {function, options}.

    Raises:
        ValueError: the function cannot be loaded, or its signature is none of those above; names the key.
    """
    options = {name: value for name, value in node.items() if name != "function"}
    function = UserFunction(node["function"], options, key)
    for signature in LISTS:
        if signature.mark in function.parameters:
            return BatchFunction(function, signature)
    verl = "solution_str" in function.parameters
    if not verl and tuple(function.parameters)[:2] != ROW_NAMES:
        raise ValueError(
            f"{key}.function={node['function']}: its parameters ({', '.join(function.parameters)}) are of no known "
            f"signature; write one of {SIGNATURES}"
        )
    return RowFunction(function, verl)


def load_function(path: Any, key: str) -> Callable[..., Any]:
    """The function at `path/to/file.py:name` or `package.module:name`.

    Raises:
        ValueError: there is none; names the key.
    """
    place, _, name = path.rpartition(":") if isinstance(path, str) else ("", "", "")
    if not place or not name:
        raise ValueError(f"{key}={path}: write it as path/to/file.py:name or package.module:name")
    return import_named(place, name, f"{key}={path}", "function")
