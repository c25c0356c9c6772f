"""The output: messages on stderr, the start line, the tables of the dry run.

Who reports what concerns all is decided in `reporter`, when a wait is reported in
`intervals`.
"""
