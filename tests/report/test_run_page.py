"""report.html: all metrics are in it, all text is escaped, killed runs have one too, nothing is fetched."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

from rft.report.page import SCRIPT
from rft.report.run_page import ROWS_SHOWN, chart_groups, write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Tags(HTMLParser):
    """Collects the tags, the attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def make(run: Path, word: str = "plain", steps: int = 8) -> Path:
    (run / "trajectories").mkdir(parents=True)
    lines = []
    for step in range(steps):
        row = {"step": step, "stage": f"train{word}", f"eval/{word}/accuracy": step / 10, "reward/mean": step / 20}
        lines.append(row | {f"extra/{word}": 1.0, "loss/policy": None if step == 3 else 0.1 * step, "entropy": 2.0})
        sample = {"prompt": f"prompt{step} {word}", "response": f"response {word}", "score": step / 10, word: [word]}
        (run / "trajectories" / f"step_{step:08d}.jsonl").write_text(f"{json.dumps(sample)}\n" * 9, encoding="utf-8")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run / "config.yaml").write_text(f"name: x  # {word}\nbatch:\n  prompts: 16\nplugins:\n- {json.dumps(word)}\n")
    return run


def test_every_metric_has_exactly_one_chart() -> None:
    names = [
        "eval/a/accuracy",
        "eval/a/accuracy_stderr",
        "eval/a/length_mean",
        "eval/b/pass@4",
        "reward/mean",
        "reward/x",
        "reward/x/letters",
        "reward/unscored",
        "reward/x/unscored",
        "reward/x/unscored/deadline",
    ]
    names += ["reward/std", "loss/policy", "kl/ref", "clip/low", "clip/high", "length/mean", "length/max", "mine"]
    names += ["length/truncated", "time/step_s", "time/generate_s", "time/elapsed_s", "lr", "throughput/tokens_per_s"]
    groups = chart_groups(names)
    shown = [name for charts in groups.values() for group in charts.values() for name in group]
    assert sorted(shown) == sorted(set(names) - {"time/elapsed_s", "eval/a/accuracy_stderr"})
    assert groups["Evaluation and reward"] == {
        "eval/a": ["eval/a/accuracy"],
        "eval/b": ["eval/b/pass@4"],
        "reward": ["reward/mean", "reward/x"],
        "reward/x/letters": ["reward/x/letters"],
        "rows without a score": ["reward/unscored", "reward/x/unscored", "reward/x/unscored/deadline"],
    }
    assert groups["Texts"]["eval/a, tokens"] == ["eval/a/length_mean"]
    assert groups["Learning"]["clipped share"] == ["clip/low", "clip/high"]
    assert groups["Time and memory"]["seconds a step"] == ["time/step_s", "time/generate_s"]
    assert groups["More"] == {"mine": ["mine"]}


def test_report_shows_curves_samples_and_config(tmp_path: Path) -> None:
    path = write_report(make(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    page = Tags(path.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 5  # eval, reward, loss, entropy, extra
    assert page.tags.count("h1") == 1
    for text in ("run", "eval/plain", "loss/policy", "7 steps", "0.7", "prompts", "prompt0 plain", "prompt7 plain"):
        assert text in page.text
    shown = [step for step in range(8) if f"Step {step} " in page.text]
    assert shown == [0, 1, 3, 4, 6, 7]  # six files, evenly spread, the first and the last among them
    assert page.text.count("prompt7 plain") == ROWS_SHOWN


def test_all_text_is_escaped(tmp_path: Path) -> None:
    text = write_report(make(tmp_path / "a<b>", EVIL.replace("/", "|"))).read_text(encoding="utf-8")
    text += write_report(make(tmp_path / "b", EVIL)).read_text(encoding="utf-8")
    page = Tags(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and page.tags.count("b") > 0
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.text.count("alert(1)") > 20  # it is there, as text


def test_only_the_pages_own_script_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    text = write_report(make(tmp_path / "run")).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert f"<script>{SCRIPT}</script>" in text
    assert "http://" not in text and "https://" not in text and "@import" not in text


def test_a_killed_run_has_a_report(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    for path in (run / "metrics.jsonl", run / "trajectories" / "step_00000007.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 8, "prompt": "unfin')
    assert "7 steps" in write_report(run).read_text(encoding="utf-8")


def test_a_run_without_numbers_has_a_report(tmp_path: Path) -> None:
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "no numbers logged yet" in text and "<svg" not in text


def test_the_report_is_replaced_whole(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "report.html").write_text("old")
    write_report(run)
    assert "old" not in (run / "report.html").read_text(encoding="utf-8")[:3]
    assert sorted(p.name for p in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "trajectories"]


def test_samples_without_a_score_are_shown(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_00000000.jsonl").write_text('{"prompt": "p", "response": "the answer"}\n')
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "the answer" in text and 'class="score"' not in text
