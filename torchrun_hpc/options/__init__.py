"""The command line: our options and torchrun's.

`command_line` parses it without torch, and `options` has the type of each option.
`torchrun_parser` is torch's own parser with our options, which has the last word on the
command line of an agent. `script` checks the file that the workers run.
"""
