"""Numbers of a row: its score, its group and its pair, which rows train, and the rewards of its tokens."""
