"""Rewards of responses. Importing this package registers its reward functions."""

from rft.reward import choice, gsm8k, text
from rft.reward.registry import REWARDS

__all__ = ["REWARDS", "choice", "gsm8k", "text"]
