"""Reward terms that other processes compute."""
