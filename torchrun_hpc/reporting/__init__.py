"""The output: messages on stderr, the start line, the tables of the dry run."""
