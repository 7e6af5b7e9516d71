"""The script that takes the README's pictures: the commands that it runs, and the browser."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pictures import SHOWN, browser_command, find_browser, readme_command  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_the_commands_are_those_of_the_readme() -> None:
    assert readme_command(README, multirun=False) == ["-m", "rft.main"]
    assert readme_command(README, multirun=True)[:3] == ["-m", "rft.main", "-m"]
    with pytest.raises(ValueError, match=r"README\.md has no command python -m rft\.main -m"):
        readme_command("```bash\npython -m rft.main\n```\n", multirun=True)


def test_the_readme_shows_every_picture() -> None:
    assert all(f"](docs/pictures/{picture.name})" in README for picture in SHOWN)


def test_a_missing_browser_is_an_error_that_names_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"chromium, .* is on PATH; install Chromium"):
        find_browser()
    (tmp_path / "google-chrome").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "google-chrome", 0o755)
    assert find_browser() == str(tmp_path / "google-chrome")


def test_only_root_draws_without_a_sandbox(tmp_path: Path) -> None:
    page, target = tmp_path / "a page.html", tmp_path / "a.png"
    command = browser_command("chrome", page, target, 500, tmp_path, root=False)
    assert command[-2:] == [f"--screenshot={target}", f"file://{tmp_path}/a%20page.html"]
    assert "--window-size=1100,500" in command and "--no-sandbox" not in command
    assert "--no-sandbox" in browser_command("chrome", page, target, 500, tmp_path, root=True)
