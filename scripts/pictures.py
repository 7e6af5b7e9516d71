"""Runs the README's default run and its sweep, and writes pictures of their pages to docs/pictures/.

python scripts/pictures.py                    # both commands in a new folder, then the pictures
python scripts/pictures.py --runs FOLDER      # in FOLDER; a command whose page is there already does not run again

It needs Chromium or Chrome on PATH. It prints the wall time and the processor time of each command that runs.
"""

import argparse
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH = 1100  # pixels; below about 1,100 the README on a screen would show the text too small
DRAW_MS = 2000  # virtual time that a page gets for its layout and script


@dataclass(frozen=True)
class Picture:
    """The top of a page.

    Args:
        name: of the file under docs/pictures/.
        multirun: whether the README's command of the page is a sweep.
        page: where the command writes the page.
        height: pixels that are shown.
    """

    name: str
    multirun: bool
    page: Path
    height: int


SHOWN = (
    Picture("report.png", False, Path("outputs/reverse-grpo-seed0/report.html"), 948),
    Picture("sweep.png", True, Path("outputs/sweep/comparison.html"), 1222),
)


def main() -> None:
    """Runs what is missing and takes the pictures."""
    parser = argparse.ArgumentParser(description="Takes the README's pictures.")
    parser.add_argument(
        "--runs", type=Path, default=None, help="folder of the runs (default: a new one in the temporary folder)"
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures (default: docs/pictures)")
    arguments = parser.parse_args()
    try:
        browser = find_browser()
        folder = Path(arguments.runs or tempfile.mkdtemp(prefix="rft-pictures-")).resolve()
        arguments.out.mkdir(parents=True, exist_ok=True)
        for picture in SHOWN:
            page = folder / picture.page
            if not page.exists():
                run(readme_command((ROOT / "README.md").read_text(), picture.multirun), folder)
            screenshot(browser, page, arguments.out / picture.name, picture.height)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


def find_browser() -> str:
    """The first browser of `BROWSERS` on PATH.

    Raises:
        ValueError: there is none.
    """
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise ValueError(f"no browser takes the pictures: none of {', '.join(BROWSERS)} is on PATH; install Chromium")


def readme_command(text: str, multirun: bool) -> list[str]:
    """The arguments of the page's first command `python -m rft.main`, or of its first sweep (`-m` after rft.main)."""
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for command in re.split(r"\n|&&", block):
            words = shlex.split(command)
            if words[:3] == ["python", "-m", "rft.main"] and ("-m" in words[3:]) == multirun:
                return words[1:]
    raise ValueError(f"README.md has no command python -m rft.main {'-m ' * multirun}any more")


def run(arguments: Sequence[str], folder: Path) -> None:
    """Runs python with these arguments in the folder and prints how long it took."""
    folder.mkdir(parents=True, exist_ok=True)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise RuntimeError(f"python {shlex.join(arguments)} ended with status {done.returncode}")
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stdout.write(f"python {shlex.join(arguments)}: {wall:.0f} s, {processor:.0f} s of processor time\n")


def screenshot(browser: str, page: Path, target: Path, height: int) -> None:
    """Writes a PNG of the top of a page."""
    target.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="rft-browser-") as profile:
        command = browser_command(browser, page, target, height, Path(profile), os.geteuid() == 0)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode or not target.exists():
        raise RuntimeError(f"{shlex.join(command)} wrote no picture: {done.stderr.strip()[-2000:]}")
    sys.stdout.write(f"{target}: {target.stat().st_size / 1024:.0f} KB\n")


def browser_command(browser: str, page: Path, target: Path, height: int, profile: Path, root: bool) -> list[str]:
    """The command line that draws the top of a page without a screen. Chromium's sandbox does not work for root."""
    return [
        browser,
        "--headless",
        *(["--no-sandbox"] if root else []),
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{height}",
        f"--virtual-time-budget={DRAW_MS}",
        f"--screenshot={target.resolve()}",
        page.resolve().as_uri(),
    ]


if __name__ == "__main__":
    main()
