"""Changes that no test can notice, each with the reason: (function, the changed line) -> why it changes nothing."""

EQUIVALENT: dict[tuple[str, str], str] = {}
