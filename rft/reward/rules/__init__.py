"""Rewards that are functions of one response and its row. Importing this package registers them."""

from rft.reward.rules import choice, gsm8k, math, text

__all__ = ["choice", "gsm8k", "math", "text"]
