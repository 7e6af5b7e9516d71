"""Rows that packages make."""

# A field of rows of reasoning-gym: task, its options, question, answer and metadata, which the checker reads. It stands
# here because workers import the checker, and not what makes the rows, which imports torch.
REASONING_GYM = "reasoning_gym"
