"""Where the numbers of a run go: console, metrics.jsonl, report.html, TensorBoard, Weights & Biases."""
