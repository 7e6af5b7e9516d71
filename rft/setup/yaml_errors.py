"""One line about a yaml file of the user that cannot be read. Nothing slow is imported, since no config is composed."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

YAML_ERRORS = (YAMLError, UnicodeDecodeError, RecursionError)


def broken_yaml(folders: Iterable[str | None]) -> str | None:
    """A message about the first yaml file below the folders that cannot be read, with its path and line; or None."""
    for folder in filter(None, folders):
        for path in sorted(Path(folder).rglob("*.yaml")):
            try:
                OmegaConf.load(path)
            except MarkedYAMLError as error:
                mark = error.problem_mark or error.context_mark
                return f"{path}{'' if mark is None else f' line {mark.line + 1}'}: {_problem(error)}"
            except ReaderError as error:
                text = path.read_text(encoding="utf-8")
                line = text.count("\n", 0, error.position) + 1
                return (
                    f"{path} line {line}: the character U+{ord(text[error.position]):04X} is no part of yaml; remove it"
                )
            except UnicodeDecodeError as error:
                line = error.object[: error.start].count(b"\n") + 1
                byte = error.object[error.start]
                return f"{path} line {line}: not UTF-8 (byte {byte:#04x}); save the file in UTF-8"
            except RecursionError:
                return f"{path}: lists and mappings are nested too deeply; write a flatter file"
            except (OSError, ValueError) as error:
                return f"{path}: {error}"
    return None


def _problem(error: MarkedYAMLError) -> str:
    problem = ", ".join(filter(None, (error.context, error.problem)))
    for words, cure in CURES.items():
        if words in problem:
            return f"{problem}; {cure}"
    return f"{problem}; correct the yaml"


CURES = {
    "'\\t'": "indent with spaces",
    "duplicate key": "remove one of the two",
    "constructor for the tag": "yaml of a config has no tags; remove it, or quote a text that begins with '!'",
    "undefined alias": "quote a text that begins with '*'",
    "single document": "remove the line '---'",
    "mapping values are not allowed": "quote a text that contains ': '",
    "expected <block end>": "indent the keys of a mapping equally",
}
