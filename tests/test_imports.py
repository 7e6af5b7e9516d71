"""Imports by name: parts of the package, folders of plugins, and functions of the user's."""

import sys

import pytest

from rft.imports import import_all, import_part
from rft.registry import Registry

KEY = "algorithm.loss"


def test_a_part_that_is_not_there_is_named_and_what_a_part_lacks_is_no_mistake_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "part_without_package.py").write_text("import package_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^mode=x: part_not_here\.run is not in this package"):
        import_part("part_not_here.run", "f", "mode=x")
    with pytest.raises(ModuleNotFoundError, match="package_of_nobody"):
        import_part("part_without_package", "f", "mode=x")


def test_a_folder_of_plugins_imports_the_files_that_are_there(tmp_path, monkeypatch):
    folder = tmp_path / "plugins_of_a_folder"
    folder.mkdir()
    (folder / "__init__.py").write_text("from rft.imports import import_all\n\nimport_all(__name__)\n")
    (folder / "first.py").write_text("NUMBER = 1\n")
    (folder / "second.py").write_text("NUMBER = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_all("plugins_of_a_folder")
    assert [sys.modules[f"plugins_of_a_folder.{name}"].NUMBER for name in ("first", "second")] == [1, 2]


@pytest.fixture
def losses(tmp_path, monkeypatch):
    """A registry, and the modules `own_losses` and `own_package.losses`, of which the first registers `kept` in it."""
    registry = Registry("loss", reads=())
    monkeypatch.setattr("builtins.OF_A_TEST", registry, raising=False)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "losses.py").write_text("def plain(logprobs, batch): ...\n")
    (tmp_path / "own_losses.py").write_text(
        "def plain(logprobs, batch, *, tau: float):\n    return tau * logprobs, batch\n\n\n"
        "@OF_A_TEST.register('kept', reads=('advantages',))\ndef stated(logprobs, batch): ...\n"
    )
    (tmp_path / "own_broken.py").write_text("A = 1\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield registry
    for name in ("own_losses", "own_package", "own_package.losses"):
        sys.modules.pop(name, None)


def test_a_name_with_a_dot_is_a_function_of_a_module(losses):
    plugin = losses.build({"name": "own_losses.plain", "tau": 0.5}, KEY)
    assert (plugin.title, plugin.facts.reads) == ("the loss 'own_losses.plain'", ())
    assert plugin(2.0, "b") == (1.0, "b")
    assert losses.function("own_losses.plain") is sys.modules["own_losses"].plain
    assert losses.build({"name": "own_package.losses.plain"}, KEY).facts.reads == ()


def test_a_function_that_its_module_registers_has_the_facts_that_it_states(losses):
    assert losses.build({"name": "own_losses.stated"}, KEY).facts.reads == ("advantages",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_lossses.plain", "no module 'own_lossses' is found; it is looked for beside the recipe"),
        ("own_package.loss.plain", "no module 'own_package.loss' is found; it is looked for"),
        ("nowhere.losses.plain", "no module 'nowhere.losses' is found; it is looked for"),
        (".plain", "no module '' is found; it is looked for"),
        ("own_losses.plane", "own_losses has no loss 'plane'; did you mean plain?"),
        ("own_broken.plain", "the module 'own_broken' cannot be imported: own_broken.py:2: ZeroDivisionError: division"),
    ],
)
def test_a_name_with_a_dot_that_leads_nowhere_is_an_error_with_its_key(losses, name, message):
    with pytest.raises(ValueError) as raised:
        losses.build({"name": name}, KEY)
    assert str(raised.value).startswith(f"algorithm.loss.name={name}: {message}")


def test_names_that_come_with_the_data_import_nothing(losses):
    from rft.reward.rules.instructions.checks import INSTRUCTIONS

    for name in ("own_losses.plain", "os.system"):
        with pytest.raises(ValueError, match="no instruction is called"):
            INSTRUCTIONS.build({"name": name, "tau": 0.5}, "kwargs")
    assert "own_losses" not in sys.modules
