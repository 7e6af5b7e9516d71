"""Reward terms that are models of this process."""
