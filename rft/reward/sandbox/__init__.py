"""A sandbox for programs that a language model wrote, and the reward that runs their tests in it."""
