"""What runs in the fork server of the sandbox. Its modules import the standard library alone."""
