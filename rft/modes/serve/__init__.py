"""`mode=serve`: a model, or the terms of a reward."""
