"""rft: fine-tunes language models by reinforcement. The entry point is `python -m rft.main`."""

__version__ = "0.1.0"
