"""The command line: our options and torchrun's.

`command_line` parses it without torch, by the one table of options in `options`.
`torchrun_parser` is torch's own parser with our options, which has the last word on the
command line of an agent.
"""
