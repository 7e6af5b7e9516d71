"""Rewards of responses. Importing this package registers its reward functions."""

from rft.reward import rules
from rft.reward.term import REWARDS

__all__ = ["REWARDS", "rules"]
