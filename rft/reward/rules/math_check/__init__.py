"""The parts of the reward `math`: where the answer stands, what it says, and when two answers are equal."""
