"""The output: messages on stderr, the start line, the tables of the dry run.

`reporter` decides which node reports for all, `intervals` when a wait is reported.
"""
