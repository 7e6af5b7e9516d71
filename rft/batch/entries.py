"""Names of entries that are added to the fields of a row. Without torch: workers of rewards import them."""

UNSCORED = "unscored"  # {term: reason}
PROMPT_OPENS = "prompt_opens"  # the mark of the thought in which the rendered prompt ends
EPISODE = "episode"  # the record of an episode; also its "term" in UNSCORED if it failed
