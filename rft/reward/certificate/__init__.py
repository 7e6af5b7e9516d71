"""Certificates of graders: right responses score 1, other answers 0, and the same text twice the same."""
