"""What Python writes of an exception."""

CAUSE = "ValueError: bad batch 17"
RAISED = f"""\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
{CAUSE}"""
