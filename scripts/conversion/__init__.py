"""What `scripts/convert.py` reads and writes."""
