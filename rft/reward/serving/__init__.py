"""The HTTP server of reward terms, which `mode=serve` starts."""
