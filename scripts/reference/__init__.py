"""The page docs/reference.md: every key of the config, with what the code and the yaml files say about it."""
