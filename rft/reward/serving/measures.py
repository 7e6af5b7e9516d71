"""What a server of reward terms has done, as the text that Prometheus reads."""

from collections import Counter, defaultdict

from rft.batch.scores import Scores, spell_reason

PREFIX = "rft_reward_"


class Measures:
    """Counts since the start of the server.

    Attributes:
        requests: by path and HTTP status.
        seconds: between the arrival of a request and its answer, by path.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._scored = 0
        self._unscored: Counter[tuple[str, str]] = Counter()

    def add(self, scores: Scores) -> None:
        """Counts the responses of a request, and the terms that gave no score, by reason."""
        self._scored += int((~scores.total.isnan()).sum())
        for reasons in scores.unscored:
            self._unscored.update((term, spell_reason(reason)) for term, reason in reasons.items())

    def text(self, in_flight: int) -> str:
        """All numbers in the text format of Prometheus, version 0.0.4.

        Args:
            in_flight: requests that wait or are being scored.
        """
        lines = [
            *_head("requests_total", "counter", "requests by path and HTTP status"),
            *(_line("requests_total", n, path=path, status=status) for (path, status), n in self.requests.items()),
            *_head("seconds_total", "counter", "seconds from requests to answers by path"),
            *(_line("seconds_total", round(n, 6), path=path) for path, n in self.seconds.items()),
            *_head("scored_total", "counter", "responses with a score"),
            _line("scored_total", self._scored),
            *_head("unscored_total", "counter", "responses without a score of a term, by term and reason"),
            *(_line("unscored_total", n, term=term, reason=cause) for (term, cause), n in self._unscored.items()),
            *_head("in_flight", "gauge", "requests that wait or are being scored"),
            _line("in_flight", in_flight),
        ]
        return "".join(f"{line}\n" for line in lines)


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} {kind}"]


def _line(name: str, value: float, **labels: object) -> str:
    inner = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
    return f"{PREFIX}{name}{{{inner}}} {value}" if inner else f"{PREFIX}{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
