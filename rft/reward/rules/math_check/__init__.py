"""The parts of the reward `math`: where the answer stands, what it means, and when two answers are equal."""
