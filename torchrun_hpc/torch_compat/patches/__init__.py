"""What is different from torch's own: one file for each difference.

`registry` lists them and applies them; `replacing` has the ways to do it.
"""
