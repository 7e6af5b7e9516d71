"""Logging: console, metrics.jsonl, TensorBoard, Weights & Biases, and reading a run folder back."""
