"""Worker processes in the sandbox, which compute reward functions."""
