"""Names of other projects, and what they are called here."""

import re
import shlex

import pytest
from hydra.errors import HydraException

from rft.main import explain, known_keys, unknown_flag
from rft.setup.other_libraries import ELSEWHERE, elsewhere
from tests.helpers import CONFIG


@pytest.mark.parametrize("ours", sorted({word for text in ELSEWHERE for word in shlex.split(text)}))
def test_what_an_option_of_another_project_is_called_here_exists(ours):
    if ours.startswith(("torchrun", "--")):
        return
    key, _, value = ours.partition("=")
    assert key in known_keys()
    if (CONFIG / key).is_dir():
        for name in re.findall(r"\w+", value):
            assert (CONFIG / key / f"{name}.yaml").is_file()


@pytest.mark.parametrize("library", ["verl", "TRL", "OpenRLHF", "LightRFT"])
def test_the_page_says_what_the_command_line_answers(library):
    page = (CONFIG.parents[1] / "docs" / "coming_from.md").read_text()
    section = page.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)
    assert len(rows) > 10
    for key, ours in rows:
        assert elsewhere(key.removeprefix("--")) == ours, key


def test_the_end_of_a_key_decides():
    assert elsewhere("actor_rollout_ref.rollout.n") == "algorithm.group_size"
    assert elsewhere("actor_rollout_ref.model.path") == "actor.path"
    assert elsewhere("clip_ratio_low") != elsewhere("clip_ratio") and elsewhere("pretrain") == "actor.path"
    assert elsewhere("n") is None and elsewhere("nothing.like.it") is None


def test_the_messages():
    error = HydraException("Could not override 'actor_rollout_ref.rollout.n'.")
    assert explain(error) == (
        "actor_rollout_ref.rollout.n: no such key; here it is algorithm.group_size (docs/elsewhere.md)"
    )
    assert unknown_flag("--n-samples-per-prompt=8") == (
        "--n-samples-per-prompt=8: no such flag; options are keys without dashes: algorithm.group_size "
        "(--help lists them)"
    )
    assert "keys without dashes: key=value" in unknown_flag("--nothing")
