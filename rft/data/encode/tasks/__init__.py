"""The built-in tasks about images and audio."""
