"""The output: messages on stderr, the start line, and the dry run's tables."""
